#include "engine/convert.h"

#include <algorithm>
#include <vector>

namespace w4conv {

BlockStatus convert_block(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, int64_t n_rows,
                          int64_t n_columns, Kind kind, int64_t group_size, uint32_t* lines, uint16_t* scales,
                          uint8_t* zero_points) {
  const Matrix shape{kind, n_rows, n_columns, is_float(kind) ? 0 : group_size, nullptr, nullptr};
  const int64_t n_tiles = shape.n_tiles(), n_lines = shape.n_lines(), n_groups = shape.n_groups();
  const int64_t row_nbytes = n_columns * dtype_nbytes(dtype);
  std::vector<TileStatus> statuses(static_cast<size_t>(n_tiles));
  struct Scratch {
    std::vector<float> row;
    std::vector<uint8_t> bytes;
  };
  std::vector<Scratch> scratch(static_cast<size_t>(pool.n_threads()));
  constexpr int64_t kTilesATask = 4;
  pool.run((n_tiles + kTilesATask - 1) / kTilesATask, [&](int64_t task, int thread) {
    Scratch& s = scratch[thread];
    s.row.resize(static_cast<size_t>(n_columns) + 32);
    s.bytes.resize((static_cast<size_t>(n_columns) + 32) * 4);
    for (int64_t tile = task * kTilesATask; tile < std::min(n_tiles, (task + 1) * kTilesATask); tile++) {
      const uint8_t* rows = values + tile * kTileRows * row_nbytes;
      const int n = static_cast<int>(std::min<int64_t>(kTileRows, n_rows - tile * kTileRows));
      uint32_t* out = lines + tile * n_lines * 16;
      statuses[tile] =
          is_float(kind) ? kernels.pack_tile(rows, row_nbytes, dtype, n, n_columns, kind, out, s.row.data(), s.bytes.data())
                         : kernels.quantize_tile(rows, row_nbytes, dtype, n, n_columns, kind, group_size, out,
                                                 scales + tile * n_groups * 16,
                                                 zero_points == nullptr ? nullptr : zero_points + tile * n_groups * 16,
                                                 s.row.data(), reinterpret_cast<int8_t*>(s.bytes.data()));
    }
  });
  BlockStatus out;
  for (int64_t tile = 0; tile < n_tiles; tile++) {
    const TileStatus& s = statuses[tile];
    if (s.bad != Bad::kNone) return {s.bad, tile * kTileRows + s.row, s.column, 0};
    out.n_underflowed += s.n_underflowed;
  }
  return out;
}

}  // namespace w4conv
