#include <immintrin.h>

#define W4CONV_TIER avxvnni
#define W4CONV_SIMD "simd_avx2.h"
#define W4CONV_VNNI
#include "dot_tier.inc.h"
