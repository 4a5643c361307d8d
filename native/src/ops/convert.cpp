#include "ops/convert.h"

#include <vector>

namespace w4conv {

TileStatus TileConverter::convert(const Kernels& kernels, const uint8_t* rows, Dtype dtype, int n_rows, uint32_t* lines,
                                  uint16_t* scales, uint8_t* zero_points) {
  const int64_t row_nbytes = n_columns_ * dtype_nbytes(dtype);
  if (is_float(kind_)) {
    return kernels.pack_tile(rows, row_nbytes, dtype, n_rows, n_columns_, kind_, lines, values_.as<float>(),
                             bytes_.as<uint8_t>());
  }
  return kernels.quantize_tile(rows, row_nbytes, dtype, n_rows, n_columns_, kind_, group_size_, lines, scales, zero_points,
                               values_.as<float>());
}

BlockStatus convert_block(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, int64_t n_rows,
                          int64_t n_columns, Kind kind, int64_t group_size, uint32_t* lines, uint16_t* scales,
                          uint8_t* zero_points) {
  const Matrix shape{kind, n_rows, n_columns, is_float(kind) ? 0 : group_size, nullptr, nullptr};
  const int64_t n_tiles = shape.n_tiles(), n_lines = shape.n_lines(), n_groups = shape.n_groups();
  const int64_t tile_nbytes = kTileRows * n_columns * dtype_nbytes(dtype);
  std::vector<TileStatus> statuses(static_cast<size_t>(n_tiles));
  std::vector<TileConverter> converters;
  for (int i = 0; i < pool.n_threads(); i++) converters.emplace_back(kind, n_columns, group_size);
  constexpr int64_t kTilesATask = 4;
  pool.run((n_tiles + kTilesATask - 1) / kTilesATask, [&](int64_t task, int thread) {
    for (int64_t tile = task * kTilesATask; tile < std::min(n_tiles, (task + 1) * kTilesATask); tile++) {
      statuses[tile] = converters[thread].convert(kernels, values + tile * tile_nbytes, dtype, shape.rows_of(tile),
                                                  lines + tile * n_lines * 16, scales + tile * n_groups * 16,
                                                  zero_points == nullptr ? nullptr : zero_points + tile * n_groups * 16);
    }
  });
  BlockStatus out;
  for (int64_t tile = 0; tile < n_tiles; tile++) {
    const TileStatus& s = statuses[tile];
    if (s.status != Status::kOk) return {s.status, tile * kTileRows + s.row, s.column, 0};
    out.n_underflowed += s.n_underflowed;
  }
  return out;
}

}  // namespace w4conv
