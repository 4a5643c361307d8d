#include "ops/dequantize.h"

#include <algorithm>
#include <vector>

#include "ops/convert.h"

namespace w4conv {
namespace {

RowDifference merged(const std::vector<RowDifference>& rows) {
  RowDifference out{0, true};
  for (const RowDifference& r : rows) {
    if (out.largest == out.largest && !(r.largest <= out.largest)) out.largest = r.largest;  // a NaN stays
    out.equal = out.equal && r.equal;
  }
  return out;
}

RowDifference compare_row(const Kernels& kernels, const float* x, const float* y, int64_t row, int64_t n_columns,
                          const GroupSums& out) {
  const int64_t at = row * ((n_columns + out.group_size - 1) / out.group_size);
  return kernels.compare_rows(x, y, n_columns, out.group_size, out.signal + at, out.noise + at, out.cross + at);
}

int64_t n_tasks(int64_t n_rows) { return (n_rows + kTileRows - 1) / kTileRows; }

// f(row) of the rows of a task: those of a tile.
template <class F>
void each_row(int64_t task, int64_t n_rows, const F& f) {
  for (int64_t row = task * kTileRows; row < std::min(n_rows, (task + 1) * kTileRows); row++) f(row);
}

// What one thread needs to compare tiles of a matrix with their source.
struct Comparer {
  const Matrix& w;
  std::vector<float> x, y;
  TileConverter converter;
  std::vector<uint32_t> lines;
  std::vector<uint16_t> scales;
  std::vector<uint8_t> zero_points;

  explicit Comparer(const Matrix& matrix)
      : w(matrix),
        x(static_cast<size_t>(pad_to(w.n_columns, 16))),
        y(x.size()),
        converter(w.kind, w.n_columns, w.group_size),
        lines(static_cast<size_t>(w.n_lines() * 16)),
        scales(static_cast<size_t>(w.n_groups() * 16)),
        zero_points(scales.size()) {}

  bool reproduces(const Kernels& kernels, const uint8_t* rows, Dtype dtype, int64_t tile) {
    const bool has_points = w.zero_points != nullptr;
    const TileStatus status = converter.convert(kernels, rows, dtype, w.rows_of(tile), lines.data(), scales.data(),
                                                has_points ? zero_points.data() : nullptr);
    return status.status == Status::kOk && same(lines, w.lines, tile) &&
           (scales.empty() || same(scales, static_cast<const uint16_t*>(w.scales), tile)) &&
           (!has_points || same(zero_points, w.zero_points, tile));
  }
  template <class T>
  static bool same(const std::vector<T>& made, const T* part, int64_t tile) {
    return std::equal(made.begin(), made.end(), part + tile * static_cast<int64_t>(made.size()));
  }
};

}  // namespace

void dequantize(const Kernels& kernels, Pool& pool, const Matrix& w, float* out) {
  std::vector<std::vector<float>> scratch(static_cast<size_t>(pool.n_threads()));
  pool.run(n_tasks(w.n_rows), [&](int64_t task, int thread) {
    std::vector<float>& values = scratch[thread];
    values.resize(static_cast<size_t>(pad_to(w.n_columns, 16)));
    each_row(task, w.n_rows, [&](int64_t row) {
      kernels.dequantize_row(w, row, values.data());
      std::copy_n(values.data(), w.n_columns, out + row * w.n_columns);
    });
  });
}

RowDifference compare(const Kernels& kernels, Pool& pool, const float* x, const float* y, int64_t n_rows, int64_t n_columns,
                      const GroupSums& out) {
  std::vector<RowDifference> rows(static_cast<size_t>(n_rows));
  pool.run(n_tasks(n_rows), [&](int64_t task, int) {
    each_row(task, n_rows, [&](int64_t row) {
      rows[row] = compare_row(kernels, x + row * n_columns, y + row * n_columns, row, n_columns, out);
    });
  });
  return merged(rows);
}

SourceDifference compare_with_source(const Kernels& kernels, Pool& pool, const uint8_t* values, Dtype dtype, const Matrix& w,
                                     bool reproduce, const GroupSums& out) {
  std::vector<RowDifference> rows(static_cast<size_t>(w.n_rows));
  std::vector<char> reproduced(static_cast<size_t>(w.n_tiles()), reproduce);
  std::vector<Comparer> comparers;
  for (int i = 0; i < pool.n_threads(); i++) comparers.emplace_back(w);
  const int64_t row_nbytes = w.n_columns * dtype_nbytes(dtype);
  pool.run(w.n_tiles(), [&](int64_t tile, int thread) {
    Comparer& c = comparers[thread];
    each_row(tile, w.n_rows, [&](int64_t row) {
      kernels.load_values(values + row * row_nbytes, dtype, w.n_columns, c.x.data());
      kernels.dequantize_row(w, row, c.y.data());
      rows[row] = compare_row(kernels, c.x.data(), c.y.data(), row, w.n_columns, out);
    });
    if (reproduce) reproduced[tile] = c.reproduces(kernels, values + tile * kTileRows * row_nbytes, dtype, tile);
  });
  return {merged(rows), std::all_of(reproduced.begin(), reproduced.end(), [](char same) { return same != 0; })};
}

}  // namespace w4conv
