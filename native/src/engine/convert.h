// Conversion of a block of rows, tile by tile on several threads.
#pragma once
#include "engine/pool.h"
#include "w4conv/kernels.h"

namespace w4conv {

struct BlockStatus {
  Bad bad = Bad::kNone;
  int64_t row = 0, column = 0;  // of the first bad value, in row order
  int64_t n_underflowed = 0;
};

// n_rows x n_columns values -> lines [tile][n_lines][16] and, but for float kinds, scales [tile][n_groups][16]; for kInt4z
// also zero_points [tile][n_groups][16].
BlockStatus convert_block(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, int64_t n_rows,
                          int64_t n_columns, Kind kind, int64_t group_size, uint32_t* lines, uint16_t* scales,
                          uint8_t* zero_points);

}  // namespace w4conv
