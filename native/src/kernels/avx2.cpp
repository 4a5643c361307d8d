#include <immintrin.h>

#include "w4conv/kernels.h"

namespace w4conv {
namespace avx2 {
namespace {
#include "simd_avx2.h"
// The algorithms, once for all tiers.
#include "matmul.inc.h"
#include "rows.inc.h"
#include "attention.inc.h"
#include "convert.inc.h"
#include "compare.inc.h"
#include "calibrated.inc.h"
#include "peak.inc.h"
}  // namespace
}  // namespace avx2

const Kernels kAvx2Kernels = {
#define W4CONV_TIER avx2
#define W4CONV_TIER_NAME "avx2"
#include "table.inc.h"
};

}  // namespace w4conv
