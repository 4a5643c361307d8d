#include "w4conv/kernels.h"

namespace w4conv {
namespace scalar {
namespace {
#include "simd_scalar.h"
// The algorithms, once for all tiers.
#include "matmul.inc.h"
#include "rows.inc.h"
#include "attention.inc.h"
#include "convert.inc.h"
#include "compare.inc.h"
#include "calibrated.inc.h"
#include "peak.inc.h"
}  // namespace
}  // namespace scalar

const Kernels kScalarKernels = {
#define W4CONV_TIER scalar
#define W4CONV_TIER_NAME "scalar"
#include "table.inc.h"
};

}  // namespace w4conv
