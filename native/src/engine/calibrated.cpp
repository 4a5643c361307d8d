#include "engine/calibrated.h"

#include <algorithm>
#include <vector>

namespace w4conv {
namespace {

// work(tile, n_floats of scratch) for each tile.
template <class Work>
void each_tile(Pool& pool, int64_t n_tiles, int64_t n_floats, Work work) {
  std::vector<std::vector<float>> scratch(static_cast<size_t>(pool.n_threads()));
  pool.run(n_tiles, [&](int64_t tile, int thread) {
    scratch[thread].resize(static_cast<size_t>(n_floats));
    work(tile, scratch[thread].data());
  });
}

}  // namespace

int64_t cholesky(const Kernels& kernels, Pool& pool, double* a, int64_t n) {
  constexpr int64_t kPanel = kCholeskyPanel, kRows = 64;
  std::vector<double> panel(static_cast<size_t>((n + kPanel) * kPanel));
  for (int64_t first = 0; first < n; first += kPanel) {
    const int64_t width = std::min(kPanel, n - first), below = first + width;
    for (int64_t c = 0; c < width; c++) {
      for (int64_t k = 0; k < first; k++) panel[k * kPanel + c] = a[(first + c) * n + k];
    }
    const int64_t bad = kernels.cholesky_rows(a, n, first, width, first, below, true, panel.data());
    if (bad >= 0) return bad;
    pool.run((n - below + kRows - 1) / kRows, [&](int64_t task, int) {
      const int64_t begin = below + task * kRows;
      kernels.cholesky_rows(a, n, first, width, begin, std::min(n, begin + kRows), false, panel.data());
    });
  }
  return -1;
}

void round_with_feedback(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n,
                         const int32_t* group, const float* scales, int64_t n_groups, const float* factor, float top,
                         int8_t* q) {
  each_tile(pool, n_tiles, n * kTileRows, [&](int64_t tile, float* acc) {
    const int64_t at = tile * n * kTileRows;
    kernels.round_with_feedback(w + at, n, group, scales + tile * n_groups * kTileRows, factor, top, q + at, acc);
  });
}

void substitute(const Kernels& kernels, Pool& pool, float* x, int64_t n_tiles, int64_t n, const float* factor) {
  each_tile(pool, n_tiles, n * kTileRows,
            [&](int64_t tile, float* acc) { kernels.substitute(x + tile * n * kTileRows, n, factor, acc); });
}

void refine(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
            const float* h, float top, int n_rounds, uint16_t* scales, int8_t* q) {
  const int64_t n_groups = (n + group_size - 1) / group_size;
  each_tile(pool, n_tiles, 3 * n * kTileRows, [&](int64_t tile, float* scratch) {
    const int64_t at = tile * n * kTileRows;
    kernels.refine(w + at, n, group_size, h, top, n_rounds, scales + tile * n_groups * kTileRows, q + at, scratch);
  });
}

void search_scales(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
                   const float* factors, const float* pivots, const float* multipliers, int64_t n_multipliers, float top,
                   uint16_t* scales, float* errors) {
  const int64_t n_groups = (n + group_size - 1) / group_size;
  each_tile(pool, n_tiles * n_groups, group_size * kTileRows, [&](int64_t task, float* acc) {
    const int64_t tile = task / n_groups, g = task % n_groups, begin = g * group_size;
    kernels.search_scales(w + (tile * n + begin) * kTileRows, std::min(group_size, n - begin),
                          factors + g * group_size * group_size, pivots + begin, multipliers, n_multipliers, top,
                          scales + task * kTileRows, errors + task * kTileRows, acc);
  });
}

}  // namespace w4conv
