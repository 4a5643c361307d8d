#include <immintrin.h>

#define W4CONV_TIER avx512vnni
#define W4CONV_SIMD "simd_avx512.h"
#define W4CONV_VNNI
#include "dot_tier.inc.h"
