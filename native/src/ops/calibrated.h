// Calibrated rounding over whole matrices: blocks and chunks of rows shared out to the threads, the same bits for any number
// of them.
#pragma once
#include "ops/pool.h"
#include "w4conv/kernels.h"

namespace w4conv {

// GEMM: out [m][n] += a^T b, a [n_k][m], b [n_k][n], the sum over k first. With `upper` SYRK: b is a, or m is n at least;
// only what lies on and above the diagonal is made, and some below it.
void gemm(const Kernels& kernels, Pool& pool, const float* a, const float* b, int64_t n_k, int64_t m, int64_t n, bool upper,
          float* out);

// Rows and columns `columns` [n] of a symmetric h (rows of `stride`), with another diagonal, are U^T D U: unit [n][n]
// becomes U and its transpose around the diagonal of ones, pivots [n] D. Returns the first column whose pivot is not
// positive, and unit is of no use then, or -1.
int64_t factor(const Kernels& kernels, Pool& pool, const float* h, int64_t stride, const int64_t* columns,
               const float* diagonal, int64_t n, float* unit, float* pivots);

// w [n_tiles][n][16] -> q [n_tiles][n][16]; scales and qmins (the lowest integers) [n_tiles][n_groups][16], factor [n][n]
// (docs in calibrated.inc.h).
void gptq_round(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, const int32_t* group,
                const float* scales, const float* qmins, int64_t n_groups, const float* factor, const Grid& grid, int8_t* q);

// x [n_tiles][n][16] := the y of y H = x, of which factor and pivots are given.
void solve_rows(const Kernels& kernels, Pool& pool, float* x, int64_t n_tiles, int64_t n, const float* factor,
                const float* pivots);

// Codes q [n_tiles][n][16] and scales [n_tiles][n_groups][16] made better; h [n][n]. steps [n_tiles][16], of which scales
// are multiples, or null where they are FP16 numbers.
void refine(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
            const float* h, const Grid& grid, int n_rounds, const float* steps, float* scales, const float* qmins,
            int8_t* q);

// w [n_tiles][n][16], groups of group_size columns; factors [n_groups][group_size][group_size] (the last group uses its own
// width as stride) or null, pivots [n], multipliers [n_multipliers][2] -> scales, qmins and errors [n_tiles][n_groups][16].
void search_scales(const Kernels& kernels, Pool& pool, const float* w, int64_t n_tiles, int64_t n, int64_t group_size,
                   const float* factors, const float* pivots, const float* multipliers, int64_t n_multipliers,
                   const Grid& grid, const float* steps, float* scales, float* qmins, float* errors);

}  // namespace w4conv
