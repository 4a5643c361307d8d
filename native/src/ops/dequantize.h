// Coded matrices as float32 (w4-codes 5), and how far two matrices are from one another.
#pragma once
#include "ops/pool.h"
#include "w4conv/kernels.h"

namespace w4conv {

// out: [n_rows][n_columns].
void dequantize(const Kernels& kernels, Pool& pool, const Matrix& w, float* out);

// Sums of Kernels::compare_rows, each [n_rows][n_groups].
struct GroupSums {
  int64_t group_size;
  double *signal, *noise, *cross;
};

// x, y: [n_rows][n_columns].
RowDifference compare(const Kernels& kernels, Pool& pool, const float* x, const float* y, int64_t n_rows, int64_t n_columns,
                      const GroupSums& out);

struct SourceDifference : RowDifference {
  bool reproduced;  // asked for: whether round-to-nearest makes these lines, scales and zero points of the values
};
// The values of a source (x) and of a matrix made of it (y): [n_rows][n_columns] both. reproduce: scales have to be FP16.
SourceDifference compare_with_source(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, const Matrix& w,
                                     bool reproduce, const GroupSums& out);

}  // namespace w4conv
