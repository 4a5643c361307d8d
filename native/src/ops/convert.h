// Conversion of a block of rows, tile by tile on several threads.
#pragma once
#include <algorithm>

#include "ops/buffer.h"
#include "ops/pool.h"
#include "w4conv/kernels.h"

namespace w4conv {

// Tiles of one shape, one after another: for one thread.
class TileConverter {
 public:
  TileConverter(Kind kind, int64_t n_columns, int64_t group_size)
      : kind_(kind), n_columns_(n_columns), group_size_(group_size) {
    const int64_t n = is_float(kind) ? n_columns + 16 : kTileRows * pad_to(std::min(n_columns, group_size), 16);
    values_.reserve_for<float>(n);
    if (is_float(kind)) bytes_.reserve_for<uint32_t>(n);
  }

  // n_rows (up to 16) rows of values -> lines, and for kinds with groups scales and zero points (null where there are none).
  TileStatus convert(const Kernels& kernels, const uint8_t* rows, Dtype dtype, int n_rows, uint32_t* lines, uint16_t* scales,
                     uint8_t* zero_points);

 private:
  Kind kind_;
  int64_t n_columns_, group_size_;
  Buffer values_, bytes_;
};

struct BlockStatus {
  Status status = Status::kOk;
  int64_t row = 0, column = 0;  // of the first bad value, in row order
  int64_t n_underflowed = 0;
};

// n_rows x n_columns values -> lines [tile][n_lines][16] and, but for float kinds, scales [tile][n_groups][16]; for kInt4z
// also zero_points [tile][n_groups][16].
BlockStatus convert_block(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, int64_t n_rows,
                          int64_t n_columns, Kind kind, int64_t group_size, uint32_t* lines, uint16_t* scales,
                          uint8_t* zero_points);

}  // namespace w4conv
