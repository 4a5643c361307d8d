#include "bindings/bindings.h"

#include <algorithm>
#include <utility>

#include "ops/calibrated.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

using MutableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTiles = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableFloatTiles = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableCodeTiles = nb::ndarray<int8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Columns = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bound_gemm(Pool& pool, const FloatRows& a, const FloatRows& b, bool upper, const MutableFloatRows& out) {
  const auto n_k = static_cast<int64_t>(a.shape(0)), m = static_cast<int64_t>(a.shape(1));
  const auto n = static_cast<int64_t>(b.shape(1));
  require(static_cast<int64_t>(b.shape(0)) == n_k && static_cast<int64_t>(out.shape(0)) == m &&
              static_cast<int64_t>(out.shape(1)) == n && (!upper || m == n),
          "wrong shape");
  const WithoutGil without_gil;
  gemm(kernels(), pool, a.data(), b.data(), n_k, m, n, upper, out.data());
}

int64_t bound_factor(Pool& pool, const FloatRows& h, const Columns& columns, const Floats& diagonal,
                     const MutableFloatRows& unit, const MutableFloats& pivots) {
  const size_t n = columns.size();
  require(h.shape(0) == h.shape(1) && diagonal.size() == n && unit.shape(0) == n && unit.shape(1) == n && pivots.size() == n,
          "not a square matrix, or the wrong shape");
  for (size_t i = 0; i < n; i++) {
    require(columns.data()[i] >= 0 && static_cast<size_t>(columns.data()[i]) < h.shape(0), "no such column");
  }
  const WithoutGil without_gil;
  return factor(kernels(), pool, h.data(), static_cast<int64_t>(h.shape(0)), columns.data(), diagonal.data(),
                static_cast<int64_t>(n), unit.data(), pivots.data());
}

Grid grid_of(float span, bool is_asymmetric, const Floats& levels) {
  require(levels.size() == 0 || levels.size() == 16, "levels: neither 16 nor none");
  Grid grid{span, is_asymmetric, levels.size() == 16, {}, {}};
  std::copy_n(levels.data(), levels.size(), grid.levels);
  for (int node = 1; grid.is_codebook && node < 16; node++) {
    int row = 1;  // of the tree: the largest power of two up to the node
    while (2 * row <= node) row *= 2;
    const int upper = (2 * (node - row) + 1) * (8 / row);
    grid.tree[node] = (grid.levels[upper - 1] + grid.levels[upper]) / 2.0f;
  }
  return grid;
}

void bound_round(Pool& pool, const FloatTiles& w, const Tokens& group, const FloatTiles& scales, const FloatTiles& qmins,
                 const FloatRows& factor, const Grid& grid, const MutableCodeTiles& q) {
  const size_t n_tiles = w.shape(0), n = w.shape(1), n_groups = scales.shape(1);
  require(w.shape(2) == 16 && scales.shape(2) == 16 && qmins.shape(2) == 16 && q.shape(2) == 16, "tiles have 16 rows");
  require(scales.shape(0) == n_tiles && qmins.shape(0) == n_tiles && qmins.shape(1) == n_groups && q.shape(0) == n_tiles &&
              q.shape(1) == n,
          "scales, qmins or codes: wrong shape");
  require(group.size() == n && (factor.shape(0) == 0 || factor.shape(0) == n) && factor.shape(1) == n,
          "group or factor: wrong shape");
  for (size_t i = 0; i < n; i++) {
    require(group.data()[i] >= 0 && static_cast<size_t>(group.data()[i]) < n_groups, "no such group");
  }
  const WithoutGil without_gil;
  gptq_round(kernels(), pool, w.data(), static_cast<int64_t>(n_tiles), static_cast<int64_t>(n), group.data(), scales.data(),
             qmins.data(), static_cast<int64_t>(n_groups), factor.shape(0) == 0 ? nullptr : factor.data(), grid, q.data());
}

void bound_solve(Pool& pool, const MutableFloatTiles& x, const FloatRows& factor, const Floats& pivots) {
  const size_t n = x.shape(1);
  require(x.shape(2) == 16 && factor.shape(0) == n && factor.shape(1) == n && pivots.size() == n, "wrong shape");
  const WithoutGil without_gil;
  solve_rows(kernels(), pool, x.data(), static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(n), factor.data(),
             pivots.data());
}

// Of each row of tiles w, or none where scales are FP16 numbers.
const float* steps_of(const FloatRows& steps, const FloatTiles& w) {
  if (steps.shape(0) == 0) return nullptr;
  require(steps.shape(0) == w.shape(0) && steps.shape(1) == 16, "steps: wrong shape");
  return steps.data();
}

void bound_refine(Pool& pool, const FloatTiles& w, int64_t group_size, const FloatRows& h, const Grid& grid, int n_rounds,
                  const FloatRows& steps, const MutableFloatTiles& scales, const FloatTiles& qmins,
                  const MutableCodeTiles& q) {
  const auto n_tiles = static_cast<int64_t>(w.shape(0)), n = static_cast<int64_t>(w.shape(1));
  require(w.shape(2) == 16 && scales.shape(2) == 16 && q.shape(2) == 16, "tiles have 16 rows");
  require(n > 0 && group_size > 0 && group_size <= n, "group size: not between 1 and the columns");
  require(static_cast<int64_t>(h.shape(0)) == n && static_cast<int64_t>(h.shape(1)) == n, "h: wrong shape");
  require(static_cast<int64_t>(scales.shape(0)) == n_tiles && static_cast<int64_t>(q.shape(0)) == n_tiles &&
              static_cast<int64_t>(q.shape(1)) == n &&
              static_cast<int64_t>(scales.shape(1)) == (n + group_size - 1) / group_size &&
              qmins.shape(0) == scales.shape(0) && qmins.shape(1) == scales.shape(1) && qmins.shape(2) == 16,
          "scales, qmins or codes: wrong shape");
  if (grid.is_codebook) {
    for (size_t i = 0; i < q.size(); i++) require(q.data()[i] >= 0 && q.data()[i] < 16, "no such level");
  }
  const WithoutGil without_gil;
  refine(kernels(), pool, w.data(), n_tiles, n, group_size, h.data(), grid, n_rounds, steps_of(steps, w), scales.data(),
         qmins.data(), q.data());
}

void bound_search(Pool& pool, const FloatTiles& w, int64_t group_size, const FloatTiles& factors, const Floats& pivots,
                  const FloatRows& multipliers, const Grid& grid, const FloatRows& steps, const MutableFloatTiles& scales,
                  const MutableFloatTiles& qmins, const MutableFloatTiles& errors) {
  const auto n_tiles = static_cast<int64_t>(w.shape(0)), n = static_cast<int64_t>(w.shape(1));
  require(w.shape(2) == 16 && scales.shape(2) == 16 && qmins.shape(2) == 16 && errors.shape(2) == 16, "tiles have 16 rows");
  require(multipliers.shape(1) == 2, "multipliers: not two a candidate");
  require(n > 0 && group_size > 0 && group_size <= n, "group size: not between 1 and the columns");
  const int64_t n_groups = (n + group_size - 1) / group_size;
  require(static_cast<int64_t>(factors.shape(1)) == group_size && static_cast<int64_t>(factors.shape(2)) == group_size &&
              (factors.shape(0) == 0 || static_cast<int64_t>(factors.shape(0)) == n_groups) &&
              static_cast<int64_t>(pivots.size()) == n,
          "factors or pivots: wrong shape");
  for (const auto& [tiles, groups] : {std::pair{scales.shape(0), scales.shape(1)}, std::pair{qmins.shape(0), qmins.shape(1)},
                                      std::pair{errors.shape(0), errors.shape(1)}}) {
    require(static_cast<int64_t>(tiles) == n_tiles && static_cast<int64_t>(groups) == n_groups,
            "scales, qmins or errors: wrong shape");
  }
  const WithoutGil without_gil;
  search_scales(kernels(), pool, w.data(), n_tiles, n, group_size, factors.shape(0) == 0 ? nullptr : factors.data(),
                pivots.data(), multipliers.data(), static_cast<int64_t>(multipliers.shape(0)), grid, steps_of(steps, w),
                scales.data(), qmins.data(), errors.data());
}

}  // namespace

void register_calibration(nb::module_& m) {
  m.def("gemm", &bound_gemm, "pool"_a, "a"_a, "b"_a, "upper"_a, "out"_a);
  m.def("factor", &bound_factor, "pool"_a, "h"_a, "columns"_a, "diagonal"_a, "unit"_a, "pivots"_a);
  nb::class_<Grid>(m, "Grid").def(
      "__init__",
      [](Grid* self, float span, bool is_asymmetric, const Floats& levels) {
        new (self) Grid(grid_of(span, is_asymmetric, levels));
      },
      "span"_a, "is_asymmetric"_a, "levels"_a);
  m.def("gptq_round", &bound_round, "pool"_a, "w"_a, "group"_a, "scales"_a, "qmins"_a, "factor"_a, "grid"_a, "q"_a);
  m.def("solve_rows", &bound_solve, "pool"_a, "x"_a, "factor"_a, "pivots"_a);
  m.def("refine", &bound_refine, "pool"_a, "w"_a, "group_size"_a, "h"_a, "grid"_a, "n_rounds"_a, "steps"_a, "scales"_a,
        "qmins"_a, "q"_a);
  m.def("search_scales", &bound_search, "pool"_a, "w"_a, "group_size"_a, "factors"_a, "pivots"_a, "multipliers"_a, "grid"_a,
        "steps"_a, "scales"_a, "qmins"_a, "errors"_a);
}

}  // namespace w4conv::bindings
