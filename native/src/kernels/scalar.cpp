#define W4CONV_TIER scalar
#define W4CONV_SIMD "simd_scalar.h"
#include "tier.inc.h"
