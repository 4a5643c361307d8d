// A tier: every algorithm, compiled for the vectors of W4CONV_SIMD into the namespace W4CONV_TIER. Only the build knows
// which flags belong to it (cmake/isa.cmake).
#include "w4conv/kernels.h"

#define W4CONV_STRING(x) #x
#define W4CONV_NAME(x) W4CONV_STRING(x)

namespace w4conv::W4CONV_TIER {
namespace {
#include W4CONV_SIMD
//
#include "matmul.inc.h"
#include "matmul_float.inc.h"
#include "prepare.inc.h"
#include "rows.inc.h"
#include "attention.inc.h"
#include "convert.inc.h"
#include "compare.inc.h"
#include "calibrated.inc.h"
#include "peak.inc.h"
#include "sampling.inc.h"
}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
#include "dot_table.inc.h"
    ,  // The other members of struct Kernels, in order.
    W4CONV_NAME(W4CONV_TIER),
    matmul_float,
    prepare_float,
    rmsnorm,
    gated,
    softcap,
    softmax,
    store_kv,
    attention_split,
    merge_splits,
    quantize_tile,
    pack_tile,
    dequantize_row,
    load_values,
    compare_rows,
    gptq_round,
    solve_rows,
    refine,
    search_scales,
    multiply_panels,
    factor_block,
    factor_panel,
    peaks,
    weigh,
    sum_weights,
    read};

}  // namespace w4conv::W4CONV_TIER
