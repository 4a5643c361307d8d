// One row of a coded matrix as float32 (w4-codes 5).
#pragma once
#include "w4conv/kernels.h"

namespace w4conv {

// out: n_columns floats.
void dequantize_row(const Matrix& w, int64_t row, float* out);

}  // namespace w4conv
