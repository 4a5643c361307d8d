#include <immintrin.h>

#include "w4conv/kernels.h"

namespace w4conv {
namespace avx512 {
namespace {
#include "simd_avx512.h"
// The algorithms, once for all tiers.
#include "matmul.inc.h"
#include "rows.inc.h"
#include "attention.inc.h"
#include "convert.inc.h"
#include "compare.inc.h"
#include "calibrated.inc.h"
#include "peak.inc.h"
}  // namespace
}  // namespace avx512

const Kernels kAvx512Kernels = {
#define W4CONV_TIER avx512
#define W4CONV_TIER_NAME "avx512"
#include "table.inc.h"
};

}  // namespace w4conv
