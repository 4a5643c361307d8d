#include <immintrin.h>

#include "w4conv/kernels.h"

namespace w4conv {
namespace avxvnni {
namespace {
#define W4CONV_VNNI
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
}  // namespace avxvnni

const Kernels kAvxVnniKernels = {
#define W4CONV_TIER avxvnni
#define W4CONV_TIER_NAME "avxvnni"
#include "table.inc.h"
};

}  // namespace w4conv
