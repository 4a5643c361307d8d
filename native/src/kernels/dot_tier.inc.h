// A tier that differs from a lower one in its integer dot product alone: only the kernels that use it are compiled;
// dispatch.cpp takes all others from the lower tier.
#include "w4conv/kernels.h"

namespace w4conv::W4CONV_TIER {
namespace {
#include W4CONV_SIMD
//
#include "matmul.inc.h"
#include "prepare.inc.h"
#include "peak.inc.h"
}  // namespace

extern const DotKernels kKernels;
const DotKernels kKernels =
#include "dot_table.inc.h"
    ;

}  // namespace w4conv::W4CONV_TIER
