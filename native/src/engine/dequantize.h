// Coded matrices as float32 (w4-codes 5), and how far two matrices are from one another.
#pragma once
#include "engine/pool.h"
#include "w4conv/kernels.h"

namespace w4conv {

// out: n_columns floats.
void dequantize_row(const Matrix& w, int64_t row, float* out);

// out: [n_rows][n_columns].
void dequantize(Pool& pool, const Matrix& w, float* out);

// x, y: [n_rows][n_columns]. For each row and group of columns, in float64 with e = y - x: the sums of x * x, e * e and
// x * e, [n_rows][n_groups]. Sums run in 16 lanes (lane j takes columns j, j + 16, ... of the group) and end in a tree:
// lanes 0..7 plus 8..15, then 0..3 plus 4..7, and so on. Returns the largest |e|, NaN where there is one.
double distortion_sums(Pool& pool, const float* x, const float* y, int64_t n_rows, int64_t n_columns, int64_t group_size,
                       double* signal, double* noise, double* cross);

}  // namespace w4conv
