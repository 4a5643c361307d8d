#include "ops/calibrated.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/buffer.h"

namespace w4conv {
namespace {

constexpr int64_t kPanelsOfTask = 4;   // by so many: their operands stay in the second cache
constexpr int64_t kStepsOfTask = 512;  // of a sum over more
constexpr int64_t kBlockSize = int64_t{kPanel} * kPanel;

// work(task, n_floats of scratch) for each task.
template <class Work>
void each(Pool& pool, int64_t n_tasks, int64_t n_floats, Work work) {
  std::vector<Buffer> scratch(static_cast<size_t>(pool.n_threads()));
  pool.run(n_tasks, [&](int64_t task, int thread) { work(task, scratch[thread].reserve_for<float>(n_floats)); });
}

// work(first tile, rows, scratch) for each chunk of rows.
template <class Work>
void each_chunk(Pool& pool, int64_t n_tiles, int64_t n_floats, Work work) {
  constexpr int64_t kTiles = kChunkRows / kTileRows;
  each(pool, (n_tiles + kTiles - 1) / kTiles, n_floats, [&](int64_t chunk, float* scratch) {
    const int64_t tile = chunk * kTiles;
    work(tile, std::min(kTiles, n_tiles - tile) * kTileRows, scratch);
  });
}

int64_t n_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Columns [column, column + kPanel) of rows of n floats, zeros beyond.
void pack(const float* a, int64_t n, int64_t n_rows, int64_t column, float* out) {
  const int64_t width = std::min<int64_t>(kPanel, n - column);
  for (int64_t k = 0; k < n_rows; k++, out += kPanel) {
    std::copy_n(a + k * n + column, width, out);
    std::fill(out + width, out + kPanel, 0.0f);
  }
}

// [panel][n_rows][kPanel]
float* pack_all(Pool& pool, const float* a, int64_t n_rows, int64_t n, Buffer& buffer) {
  float* const out = buffer.reserve_for<float>(n_panels(n) * n_rows * kPanel);
  pool.run(n_panels(n), [&](int64_t p, int) { pack(a, n, n_rows, p * kPanel, out + p * n_rows * kPanel); });
  return out;
}

// f(i, j, n_i, n_j) for squares of up to kPanelsOfTask panels, those that lie wholly below the diagonal left out if `upper`.
template <class F>
void each_square(Pool& pool, int64_t m_panels, int64_t n_panels, bool upper, F f) {
  std::vector<std::pair<int64_t, int64_t>> corners;
  for (int64_t i = 0; i < m_panels; i += kPanelsOfTask) {
    for (int64_t j = upper ? i : 0; j < n_panels; j += kPanelsOfTask) corners.emplace_back(i, j);
  }
  each(pool, static_cast<int64_t>(corners.size()), kPanelsOfTask * kPanelsOfTask * kBlockSize,
       [&](int64_t task, float* blocks) {
         const auto [i, j] = corners[static_cast<size_t>(task)];
         f(i, j, std::min(kPanelsOfTask, m_panels - i), std::min(kPanelsOfTask, n_panels - j), blocks);
       });
}

}  // namespace

void gemm(const Kernels& kernels, Pool& pool, const float* a, const float* b, int64_t n_k, int64_t m, int64_t n, bool upper,
          float* out) {
  Buffer a_buffer, b_buffer;
  const float* const packed_a = pack_all(pool, a, n_k, m, a_buffer);
  const float* const packed_b = a == b ? packed_a : pack_all(pool, b, n_k, n, b_buffer);
  each_square(pool, n_panels(m), n_panels(n), upper, [&](int64_t i0, int64_t j0, int64_t n_i, int64_t n_j, float* blocks) {
    std::fill_n(blocks, n_i * n_j * kBlockSize, 0.0f);
    for (int64_t k = 0; k < n_k; k += kStepsOfTask) {
      const int64_t now = std::min(kStepsOfTask, n_k - k);
      for (int64_t i = 0; i < n_i; i++) {
        for (int64_t j = upper && i0 == j0 ? i : 0; j < n_j; j++) {
          kernels.multiply_panels(packed_a + ((i0 + i) * n_k + k) * kPanel, packed_b + ((j0 + j) * n_k + k) * kPanel, now,
                                  false, blocks + (i * n_j + j) * kBlockSize);
        }
      }
    }
    for (int64_t i = 0; i < n_i; i++) {
      for (int64_t j = upper && i0 == j0 ? i : 0; j < n_j; j++) {
        const float* sum = blocks + (i * n_j + j) * kBlockSize;
        const int64_t row = (i0 + i) * kPanel, column = (j0 + j) * kPanel;
        for (int64_t r = row; r < std::min(m, row + kPanel); r++, sum += kPanel) {
          for (int64_t c = column; c < std::min(n, column + kPanel); c++) out[r * n + c] += sum[c - column];
        }
      }
    }
  });
}

int64_t factor(const Kernels& kernels, Pool& pool, const float* h, int64_t stride, const int64_t* columns,
               const float* diagonal, int64_t n, float* a, float* pivots) {
  constexpr int64_t kRows = kFactorBlock;
  pool.run(n, [&](int64_t i, int) {
    const float* const row = h + columns[i] * stride;
    a[i * n + i] = diagonal[i];
    for (int64_t j = i + 1; j < n; j++) a[i * n + j] = row[columns[j]];
  });
  Buffer block_buffer, raw_buffer, unit_buffer;
  float* const block = block_buffer.reserve_for<float>(2 * kRows * kRows);
  float* const block_unit = block + kRows * kRows;
  float* const raw = raw_buffer.reserve_for<float>(n_panels(n) * kRows * kPanel);
  float* const unit = unit_buffer.reserve_for<float>(n_panels(n) * kRows * kPanel);
  for (int64_t first = 0; first < n; first += kRows) {
    // 1. The block on the diagonal.
    const int64_t width = std::min(kRows, n - first), end = first + width;
    for (int64_t k = 0; k < width; k++) {
      std::copy_n(a + (first + k) * n + first, width, block + k * kRows);
      std::fill(block + k * kRows + width, block + (k + 1) * kRows, 0.0f);
    }
    const int64_t bad = kernels.factor_block(block, kRows, width, block_unit, pivots + first);
    if (bad >= 0) return first + bad;
    for (int64_t k = 0; k < width; k++) {
      for (int64_t j = k; j < width; j++) {
        a[(first + k) * n + first + j] = a[(first + j) * n + first + k] = j == k ? 1.0f : block_unit[k * kRows + j];
      }
    }
    // 2. The panels beside it, packed. 3. What all these rows take off the rest.
    const int64_t panels = n_panels(n - end);
    pool.run(panels, [&](int64_t p, int) {
      const int64_t column = end + p * kPanel, n_columns = std::min<int64_t>(kPanel, n - column);
      float *const r = raw + p * kRows * kPanel, *const u = unit + p * kRows * kPanel;
      pack(a + first * n, n, width, column, r);
      kernels.factor_panel(block_unit, kRows, width, pivots + first, r, u);
      for (int64_t k = 0; k < width; k++) std::copy_n(u + k * kPanel, n_columns, a + (first + k) * n + column);
      for (int64_t j = 0; j < n_columns; j++) {
        float* const mirrored = a + (column + j) * n + first;
        for (int64_t k = 0; k < width; k++) mirrored[k] = u[k * kPanel + j];
      }
    });
    float* const rest = a + end * n + end;
    each_square(pool, panels, panels, true, [&](int64_t i0, int64_t j0, int64_t n_i, int64_t n_j, float* c) {
      for (int64_t i = i0; i < i0 + n_i; i++) {
        for (int64_t j = std::max(i, j0); j < j0 + n_j; j++) {
          const int64_t height = std::min<int64_t>(kPanel, n - end - i * kPanel);
          const int64_t n_columns = std::min<int64_t>(kPanel, n - end - j * kPanel);
          for (int64_t r = 0; r < height; r++) {
            std::copy_n(rest + (i * kPanel + r) * n + j * kPanel, n_columns, c + r * kPanel);
          }
          kernels.multiply_panels(unit + i * kRows * kPanel, raw + j * kRows * kPanel, width, true, c);
          for (int64_t r = 0; r < height; r++) {
            std::copy_n(c + r * kPanel, n_columns, rest + (i * kPanel + r) * n + j * kPanel);
          }
        }
      }
    });
  }
  return -1;
}

void gptq_round(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, const int32_t* group,
                const float* scales, const float* qmins, int64_t n_groups, const float* factor, const Grid& grid,
                int8_t* q) {
  each_chunk(pool, n_tiles, n * kChunkRows, [&](int64_t tile, int64_t n_rows, float* acc) {
    const int64_t at = tile * n * kTileRows, of_group = tile * n_groups * kTileRows;
    kernels.gptq_round(w + at, n, n_rows, group, scales + of_group, qmins + of_group, n_groups, factor, grid, q + at, acc);
  });
}

void solve_rows(const Kernels& kernels, Pool& pool, float* x, int64_t n_tiles, int64_t n, const float* factor,
                const float* pivots) {
  each_chunk(pool, n_tiles, n * kChunkRows, [&](int64_t tile, int64_t n_rows, float* acc) {
    kernels.solve_rows(x + tile * n * kTileRows, n, n_rows, factor, pivots, acc);
  });
}

void refine(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
            const float* h, const Grid& grid, int n_rounds, const float* steps, float* scales, const float* qmins,
            int8_t* q) {
  const int64_t n_groups = (n + group_size - 1) / group_size;
  each_chunk(pool, n_tiles, (2 * n + 3 * group_size) * kChunkRows, [&](int64_t tile, int64_t n_rows, float* scratch) {
    const int64_t at = tile * n * kTileRows, of_group = tile * n_groups * kTileRows;
    kernels.refine(w + at, n, n_rows, group_size, h, grid, n_rounds, steps == nullptr ? nullptr : steps + tile * kTileRows,
                   scales + of_group, qmins + of_group, q + at, scratch);
  });
}

void search_scales(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
                   const float* factors, const float* pivots, const float* multipliers, int64_t n_multipliers,
                   const Grid& grid, const float* steps, float* scales, float* qmins, float* errors) {
  const int64_t n_groups = (n + group_size - 1) / group_size;
  each(pool, n_tiles * n_groups, group_size * kChunkRows, [&](int64_t task, float* acc) {
    const int64_t tile = task / n_groups, g = task % n_groups, begin = g * group_size;
    kernels.search_scales(w + (tile * n + begin) * kTileRows, std::min(group_size, n - begin),
                          factors == nullptr ? nullptr : factors + g * group_size * group_size, pivots + begin, multipliers,
                          n_multipliers, grid, steps == nullptr ? nullptr : steps + tile * kTileRows,
                          scales + task * kTileRows, qmins + task * kTileRows, errors + task * kTileRows, acc);
  });
}

}  // namespace w4conv
