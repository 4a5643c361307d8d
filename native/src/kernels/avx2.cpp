#include <immintrin.h>

#define W4CONV_TIER avx2
#define W4CONV_SIMD "simd_avx2.h"
#include "tier.inc.h"
