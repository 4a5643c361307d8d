#include <immintrin.h>

#define W4CONV_TIER avx512
#define W4CONV_SIMD "simd_avx512.h"
#include "tier.inc.h"
