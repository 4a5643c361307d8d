// Rounding that is calibrated on activations (w4conv/quantization/reference_gptq.py is the definition). Every sum is a chain
// of fused multiply-adds, made by one inner kernel; only where each output needs the one before it is there other code.
//
// A chunk is up to kChunkRows rows side by side: in scratch memory, column k is the floats at k * kChunkRows. Weights and
// codes stay in tiles [n][16], one after another.

// c[r][v] = fma(a[r], b[v], c[r][v]) for each of n_k steps; with kMinus a is negated. c_row: floats from row to row.
template <bool kMinus, int kRows, int kV>
inline void chains(const float* a, int64_t a_k, const float* b, int64_t b_k, int64_t n_k, float* c, int64_t c_row) {
  vf sums[kRows][kV];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) sums[r][v] = load(c + r * c_row + v * kLanes);
  }
  for (int64_t k = 0; k < n_k; k++, a += a_k, b += b_k) {
    vf bv[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) bv[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const vf av = splat(kMinus ? -a[r] : a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kV; v++) sums[r][v] = fma(av, bv[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) store(c + r * c_row + v * kLanes, sums[r][v]);
  }
}

template <int kRows, int kV>
inline void chains_up_to(int64_t n, const float* a, int64_t a_k, const float* b, int64_t b_k, int64_t n_k, float* c) {
  if constexpr (kRows > 1) {
    if (n < kRows) return chains_up_to<kRows - 1, kV>(n, a, a_k, b, b_k, n_k, c);
  }
  chains<false, kRows, kV>(a, a_k, b, b_k, n_k, c, kChunkRows);
}

// acc[k] = fma(a[k], e, acc[k]) for columns k of [0, n) and each of n_k steps.
inline void add_steps(const float* a, int64_t a_k, const float* e, int64_t e_k, int64_t n_k, int64_t n, int64_t n_rows,
                      float* acc) {
  constexpr int64_t kWide = kTiles * kTileRows;
  for (int64_t k = 0; k < n; k += kTokens) {
    int64_t r = 0;
    for (; r + kWide <= n_rows; r += kWide) {
      chains_up_to<kTokens, kWide / kLanes>(n - k, a + k, a_k, e + r, e_k, n_k, acc + k * kChunkRows + r);
    }
    for (; r < n_rows; r += kTileRows) {
      chains_up_to<kTokens, kVectors>(n - k, a + k, a_k, e + r, e_k, n_k, acc + k * kChunkRows + r);
    }
  }
}

// Where row r of a chunk has its column j in tiles of n columns.
inline int64_t in_tiles(int64_t n, int64_t j, int64_t r) { return (r / kTileRows * n + j) * kTileRows + r % kTileRows; }

inline void clear(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = 0.0f;
}

// x within [low, high], rounded half to even.
inline vf rounded(vf x, vf low, vf high) {
  const vf magic = splat(0x1.8p23f);
  x = select((vi)(x > high), high, x);
  x = select((vi)(x < low), low, x);
  return (x + magic) - magic;
}

// The levels of a Grid. nearest: that of x / scale, of integers from `low` on, or of a codebook's levels, `low` added; 0
// where the scale is 0. restored: times the scale. divisor: made of the scale once, for many x. Codes of a codebook count
// its levels from the lowest; integers are their own.
struct IntegerLevels {
  float span;
  explicit IntegerLevels(const Grid& grid) : span(grid.span) {}
  static vf divisor(vf scale) { return scale; }
  vf nearest(vf x, vf scale, vf divisor, vf low) const {
    const vf level = rounded(x / divisor, low, low + splat(span));
    return select((vi)(scale == vf{}), vf{}, level);
  }
  vf restored(vf x, vf scale, vf divisor, vf low) const { return nearest(x, scale, divisor, low) * scale; }
  float level(int8_t code, float) const { return code; }
  vf codes(vf levels, vf) const { return levels; }
};
struct TableLevels {
  const Grid& grid;
  Levels levels, middles;
  explicit TableLevels(const Grid& g) : grid(g), levels(g.levels), middles(g.tree) {}
  static vf divisor(vf scale) { return splat(1.0f) / scale; }
  // How many middles are below, plus 16: a binary search, four steps down a tree.
  vi node(vf wanted) const {
    vi node = 2 - (vi)(wanted > splat(grid.tree[1]));
    node = node + node - (vi)(wanted > middles.of_low(node));
    node = node + node - (vi)(wanted > middles.of_low(node));
    return node + node - (vi)(wanted > middles.of_high(node));
  }
  vf nearest(vf x, vf scale, vf divisor, vf low) const {
    return select((vi)(scale == vf{}), vf{}, levels.of(node(x * divisor - low)) + low);
  }
  // Any level times a scale of 0 is 0.
  vf restored(vf x, vf scale, vf divisor, vf low) const { return (levels.of(node(x * divisor - low)) + low) * scale; }
  float level(int8_t code, float low) const { return grid.levels[code] + low; }
  vf codes(vf levels_, vf low) const { return __builtin_convertvector(node(levels_ - low) - 16, vf); }
};
// A scale as it is stored: FP16, or, where there are steps, a whole number of them.
struct ScaleGrid {
  const float* steps;  // of 16 rows, or null
  vf round(vf scale, int64_t row) const {
    if (steps == nullptr) {
      uint16_t bits[kLanes];
      to_f16(scale, bits);
      return from_f16(bits);
    }
    const vf step = load(steps + row);
    return select((vi)(step == vf{}), vf{}, rounded(scale / step, splat(-kTopScale), splat(kTopScale)) * step);
  }
};
template <class Work>
inline void on(const Grid& grid, Work work) {
  grid.is_codebook ? work(TableLevels{grid}) : work(IntegerLevels{grid});
}

// Columns from the last to the first, or with kUp from the first to the last: e = step(j, r, acc of column j at row r) goes
// to the columns k still to come, acc[k] = fma(s[j][k], e, acc[k]).
template <bool kUp, class Step>
inline void sweep(int64_t n, const float* s, int64_t stride, int64_t n_rows, float* acc, Step step) {
  constexpr int64_t kBlock = 32;
  alignas(64) float e[kBlock * kChunkRows];
  for (int64_t done = 0; done < n; done += kBlock) {
    const int64_t now = n - done < kBlock ? n - done : kBlock;
    const int64_t begin = kUp ? done : n - done - now, end = begin + now;
    for (int64_t i = 0; i < now; i++) {
      const int64_t j = kUp ? begin + i : end - 1 - i;
      float* const errors = e + i * kChunkRows;
      for (int64_t r = 0; r < n_rows; r += kLanes) store(errors + r, step(j, r, load(acc + j * kChunkRows + r)));
      const float* const row = s + j * stride;
      for (int64_t r = 0; r < n_rows; r += kLanes) {
        const vf error = load(errors + r);
        for (int64_t k = kUp ? j + 1 : begin; k < (kUp ? end : j); k++) {
          float* const p = acc + k * kChunkRows + r;
          store(p, fma(splat(row[k]), error, load(p)));
        }
      }
    }
    const int64_t first = kUp ? end : 0;
    add_steps(s + (kUp ? begin : end - 1) * stride + first, kUp ? stride : -stride, e, kChunkRows, now,
              kUp ? n - end : begin, n_rows, acc + first * kChunkRows);
  }
}

// x H = b: x comes in as b. factor: U and its transpose around the diagonal. acc: n * kChunkRows floats.
void solve_rows(float* x, int64_t n, int64_t n_rows, const float* factor, const float* pivots, float* acc) {
  clear(acc, n * kChunkRows);
  sweep<true>(n, factor, n, n_rows, acc, [&](int64_t j, int64_t r, vf fed) {
    float* const p = x + in_tiles(n, j, r);
    const vf y = load(p) - fed;
    store(p, y / splat(pivots[j]));
    return y;
  });
  clear(acc, n * kChunkRows);
  sweep<false>(n, factor, n, n_rows, acc, [&](int64_t j, int64_t r, vf fed) {
    float* const p = x + in_tiles(n, j, r);
    store(p, load(p) - fed);
    return load(p);
  });
}

// The GPTQ column update: q[j] = code of w[j] + acc[j], from the last column to the first, and its error w[j] - level *
// scale goes to the columns before it, or nowhere where `factor` is null. group[j]: whose scale column j has; scales, qmins
// (the lowest integers): [tile][n_groups][16]. acc: n * kChunkRows floats.
void gptq_round(const float* w, int64_t n, int64_t n_rows, const int32_t* group, const float* scales, const float* qmins,
                int64_t n_groups, const float* factor, const Grid& grid, int8_t* q, float* acc) {
  on(grid, [&](auto levels) {
    const auto step = [&](int64_t j, int64_t r, vf fed) {
      const int64_t at = in_tiles(n, j, r), of_group = in_tiles(n_groups, group[j], r);
      const vf scale = load(scales + of_group), original = load(w + at);
      const vf low = load(qmins + of_group);
      const vf level = levels.nearest(original + fed, scale, levels.divisor(scale), low);
      const vf code = levels.codes(level, low);
      for (int i = 0; i < kLanes; i++) q[at + i] = static_cast<int8_t>(code[i]);
      return original - level * scale;
    };
    if (factor == nullptr) {
      for (int64_t j = 0; j < n; j++) {
        for (int64_t r = 0; r < n_rows; r += kLanes) step(j, r, vf{});
      }
      return;
    }
    clear(acc, n * kChunkRows);
    sweep<false>(n, factor, n, n_rows, acc, step);
  });
}

// slope[k] = fma(errors[j], h[j][k], slope[k]) for columns k of [0, n_columns), the last of n_errors j first.
inline void spread(const float* h, int64_t n, const float* errors, int64_t n_errors, int64_t n_columns, int64_t n_rows,
                   float* slope) {
  constexpr int64_t kBlock = 64;
  for (int64_t end = n_errors; end > 0; end -= kBlock) {
    const int64_t now = end < kBlock ? end : kBlock;
    add_steps(h + (end - 1) * n, -n, errors + (end - 1) * kChunkRows, -kChunkRows, now, n_columns, n_rows, slope);
  }
}

template <class Levels>
void refine_on(Levels levels, const float* w, int64_t n, int64_t n_rows, int64_t group_size, const float* h, int n_rounds,
               const float* steps, float* scales, const float* qmins, int8_t* q, float* scratch) {
  const int64_t n_groups = (n + group_size - 1) / group_size;
  float *const slope = scratch, *const level = slope + n * kChunkRows;  // slope: e h
  float *const near = level + n * kChunkRows, *const along = near + group_size * kChunkRows;
  float* const changed = along + group_size * kChunkRows;
  clear(slope, n * kChunkRows);
  for (int64_t g = n_groups - 1; g >= 0; g--) {
    const int64_t begin = g * group_size, width = n - begin < group_size ? n - begin : group_size;
    for (int64_t k = 0; k < width; k++) {
      for (int64_t r = 0; r < n_rows; r += kLanes) {
        const int64_t from = in_tiles(n, begin + k, r);
        float* const c = level + (begin + k) * kChunkRows + r;
        const int64_t of_group = in_tiles(n_groups, g, r);
        for (int i = 0; i < kLanes; i++) c[i] = levels.level(q[from + i], qmins[of_group + i]);
        store(changed + k * kChunkRows + r, load(w + from) - load(c) * load(scales + of_group));
      }
    }
    spread(h + begin * n, n, changed, width, n, n_rows, slope);
  }
  for (int n_left = n_rounds - 1; n_left >= 0; n_left--) {
    for (int64_t g = n_groups - 1; g >= 0; g--) {
      const int64_t begin = g * group_size, width = n - begin < group_size ? n - begin : group_size;
      const float* const own = h + begin * n + begin;
      float* const of = level + begin * kChunkRows;
      clear(along, width * kChunkRows);
      spread(own, n, of, width, width, n_rows, along);
      alignas(64) float scale[kChunkRows], divisor[kChunkRows];
      for (int64_t r = 0; r < n_rows; r += kLanes) {
        vf gain = {}, curvature = {};
        for (int64_t k = 0; k < width; k++) {
          const vf c = load(of + k * kChunkRows + r);
          gain = fma(c, load(slope + (begin + k) * kChunkRows + r), gain);
          curvature = fma(c, load(along + k * kChunkRows + r), curvature);
        }
        float* const of_group = scales + in_tiles(n_groups, g, r);
        const ScaleGrid stored{steps == nullptr ? nullptr : steps + r / kTileRows * kTileRows};
        const vf before = load(of_group);
        vf best = stored.round(before + gain / curvature, r % kTileRows);
        best = select((vi)(curvature > vf{}) & (vi)(best - best == vf{}) & (vi)(best != vf{}), best, before);
        store(of_group, best);
        store(scale + r, best);
        store(divisor + r, levels.divisor(best));
        for (int64_t k = 0; k < width; k++) {
          const int64_t at = k * kChunkRows + r;
          store(near + at, fma(before - best, load(along + at), load(slope + begin * kChunkRows + at)));
          store(changed + at, load(of + at) * before);
        }
      }
      sweep<false>(width, own, n, n_rows, near, [&](int64_t j, int64_t r, vf at_j) {
        float* const p = of + j * kChunkRows + r;
        const vf best = load(scale + r), before = load(p);
        const vf low = load(qmins + in_tiles(n_groups, g, r));
        const vf after = levels.nearest(before * best + at_j / splat(own[j * n + j]), best, load(divisor + r), low);
        store(p, after);
        return (before - after) * best;
      });
      for (int64_t k = 0; k < width; k++) {
        for (int64_t r = 0; r < n_rows; r += kLanes) {
          const int64_t at = k * kChunkRows + r;
          store(changed + at, load(changed + at) - load(of + at) * load(scale + r));
        }
      }
      spread(h + begin * n, n, changed, width, n_left > 0 ? n : begin, n_rows, slope);
    }
  }
  for (int64_t k = 0; k < n; k++) {
    for (int64_t r = 0; r < n_rows; r += kLanes) {
      const vf low = load(qmins + in_tiles(n_groups, k / group_size, r));
      const vf code = levels.codes(load(level + k * kChunkRows + r), low);
      for (int i = 0; i < kLanes; i++) q[in_tiles(n, k, r) + i] = static_cast<int8_t>(code[i]);
    }
  }
}

// Codes and scales better than they were for the error e h e^T, e = w - level * scale, h symmetric with a positive diagonal.
// In each round, group by group: the scale takes its best value given all else, then every code, from the last to the first.
// scales: [tile][n_groups][16]. steps: [tile][16], of which scales are multiples, or null where they are FP16 numbers.
// scratch: (2 * n + 3 * group_size) * kChunkRows floats.
void refine(const float* w, int64_t n, int64_t n_rows, int64_t group_size, const float* h, const Grid& grid, int n_rounds,
            const float* steps, float* scales, const float* qmins, int8_t* q, float* scratch) {
  on(grid, [&](auto levels) { refine_on(levels, w, n, n_rows, group_size, h, n_rounds, steps, scales, qmins, q, scratch); });
}

constexpr int kChunkVectors = kChunkRows / kLanes;
// What the errors of the columns after j, in e, feed to column j: the sums of `sweep`, one column after another.
inline void gather(int64_t n, const float* s, int64_t j, const float* e, vf (&sums)[kChunkVectors]) {
  for (int64_t k = n - 1; k > j; k--) {
    const vf of_k = splat(s[k * n + j]);
#pragma GCC unroll 16
    for (int v = 0; v < kChunkVectors; v++) sums[v] = fma(of_k, load(e + k * kChunkRows + v * kLanes), sums[v]);
  }
}

template <class Levels>
void search_on(Levels levels, const float* w, int64_t n, const float* factor, const float* pivots, const float* multipliers,
               int64_t n_multipliers, const Grid& grid, const float* steps, float* scales, float* qmins, float* errors,
               float* e) {
  constexpr int64_t kCandidates = kChunkRows / kTileRows;  // side by side
  alignas(64) float high[kTileRows], below[kTileRows], best[kTileRows];
  alignas(64) float scale[kChunkRows], divisor[kChunkRows], low[kChunkRows], error[kChunkRows];
  const ScaleGrid stored{steps};
  const float top = (grid.span + 1.0f) / 2.0f;
  const vf lowest = grid.is_codebook ? vf{} : splat(-top);
  for (int64_t r = 0; r < kTileRows; r += kLanes) {
    vf largest = load(w + r), smallest = largest;
    for (int64_t j = 1; j < n; j++) {
      const vf x = load(w + j * kTileRows + r);
      largest = select((vi)(x > largest), x, largest);
      smallest = select((vi)(x < smallest), x, smallest);
    }
    if (grid.is_asymmetric) {
      store(high + r, select((vi)(largest > vf{}), largest, vf{}));
      store(below + r, select((vi)(smallest < vf{}), smallest, vf{}));
    } else {
      const vf extreme = select((vi)(largest > -smallest), largest, smallest);
      store(high + r, grid.is_codebook ? select((vi)(extreme < vf{}), -extreme, extreme) / splat(grid.top_level())
                                       : extreme / splat(-top));
      store(below + r, vf{});
    }
    store(best + r, vf{});
    store(qmins + r, lowest);
    store(errors + r, splat(__builtin_inff()));
  }
  for (int64_t first = 0; first < n_multipliers; first += kCandidates) {
    for (int64_t r = 0; r < kChunkRows; r += kLanes) {  // the last candidate again where there are no more: it never wins
      const int64_t i = first + r / kTileRows;
      const float* const m = multipliers + 2 * (i < n_multipliers ? i : n_multipliers - 1);
      const vf above = load(high + r % kTileRows) * splat(m[0]), under = load(below + r % kTileRows) * splat(m[1]);
      const vf candidate = stored.round(grid.is_asymmetric ? (above - under) / splat(grid.span) : above, r % kTileRows);
      store(scale + r, candidate);
      store(divisor + r, levels.divisor(candidate));
      vf own_lowest = lowest;
      if (grid.is_asymmetric) {
        own_lowest = select((vi)(candidate == vf{}), lowest, -rounded(-under / candidate, vf{}, splat(grid.span)));
      } else if (grid.is_codebook) {
        own_lowest = splat(m[1]);
      }
      store(low + r, own_lowest);
    }
    clear(error, kChunkRows);
    for (int64_t j = n - 1; j >= 0; j--) {
      vf fed[kChunkVectors] = {};
      if (factor != nullptr) gather(n, factor, j, e, fed);
      const vf pivot = splat(pivots[j]);
#pragma GCC unroll 16
      for (int v = 0; v < kChunkVectors; v++) {
        const int64_t r = v * kLanes;
        const vf original = load(w + j * kTileRows + r % kTileRows), wanted = original + fed[v];
        const vf restored = levels.restored(wanted, load(scale + r), load(divisor + r), load(low + r));
        const vf left = wanted - restored;
        store(error + r, fma(left * left, pivot, load(error + r)));
        store(e + j * kChunkRows + r, original - restored);
      }
    }
    for (int64_t r = 0; r < kChunkRows; r += kLanes) {
      const int64_t row = r % kTileRows;
      const vf found = load(error + r), candidate = load(scale + r), least = load(errors + row);
      const vi better = (vi)(found < least) & (vi)(candidate - candidate == vf{});  // not a scale beyond FP16
      store(best + row, select(better, candidate, load(best + row)));
      store(qmins + row, select(better, load(low + r), load(qmins + row)));
      store(errors + row, select(better, found, least));
    }
  }
  for (int64_t r = 0; r < kTileRows; r += kLanes) {
    const vf found = load(best + r);
    store(scales + r, select((vi)(found == vf{}), vf{}, found));  // +0
  }
}

// Scales of one group of n columns of a tile, and the lowest levels: of the candidates that multipliers[i] make of those of
// round-to-nearest, the first with the least sum_j pivots[j] r[j]^2, where r[j] = w[j] + acc[j] - level * scale with
// feedback as above inside the group, or none where `factor` is null. multipliers: of the scale, and the shift of a
// codebook; on an asymmetric grid, of the highest and of the lowest value. factor: [n][n]. acc: n * kChunkRows floats.
// steps: 16, or null. scales, qmins, errors: 16.
void search_scales(const float* w, int64_t n, const float* factor, const float* pivots, const float* multipliers,
                   int64_t n_multipliers, const Grid& grid, const float* steps, float* scales, float* qmins, float* errors,
                   float* acc) {
  on(grid, [&](auto levels) {
    search_on(levels, w, n, factor, pivots, multipliers, n_multipliers, grid, steps, scales, qmins, errors, acc);
  });
}

// c[i][j] += sum over k of a[k][i] * b[k][j], or -=, one chain that goes on from c. a, b: [n_k][kPanel], c:
// [kPanel][kPanel].
template <bool kMinus>
void multiply(const float* a, const float* b, int64_t n_k, float* c) {
  constexpr int kRows = kLanes == 16 ? 8 : kTokens, kV = kLanes == 16 ? 3 : kTiles * kVectors;
  constexpr int64_t kBlock = 128;  // steps whose operands stay in the first cache
  for (int64_t k = 0; k < n_k; k += kBlock) {
    const int64_t now = n_k - k < kBlock ? n_k - k : kBlock;
    for (int64_t j = 0; j < kPanel; j += kV * kLanes) {
      for (int64_t i = 0; i < kPanel; i += kRows) {
        chains<kMinus, kRows, kV>(a + k * kPanel + i, kPanel, b + k * kPanel + j, kPanel, now, c + i * kPanel + j, kPanel);
      }
    }
  }
}
void multiply_panels(const float* a, const float* b, int64_t n_k, bool minus, float* c) {
  minus ? multiply<true>(a, b, n_k, c) : multiply<false>(a, b, n_k, c);
}

// The block on the diagonal of a factor: raw [n][n], upper triangle -> unit [n][n], pivots. Returns the first column whose
// pivot is not positive, or -1. n: a multiple of 16, at most kFactorBlock; columns from n_columns on are left out.
int64_t factor_block(float* raw, int64_t n, int64_t n_columns, float* unit, float* pivots) {
  for (int64_t k = 0; k < n_columns; k++) {
    const float pivot = raw[k * n + k];
    if (!(pivot > 0.0f)) return k;
    pivots[k] = pivot;
    for (int64_t j = k / kLanes * kLanes; j < n; j += kLanes) store(unit + k * n + j, load(raw + k * n + j) / splat(pivot));
    for (int64_t i = k + 1; i < n_columns; i++) {
      const vf of_i = splat(-unit[k * n + i]);
      for (int64_t j = i / kLanes * kLanes; j < n; j += kLanes) {
        store(raw + i * n + j, fma(of_i, load(raw + k * n + j), load(raw + i * n + j)));
      }
    }
  }
  return -1;
}

// Columns of the rows of such a block, beside it: raw [n_rows][kPanel] less what the rows above make of it, then
// unit = raw / pivots. block: unit of factor_block, rows of n.
void factor_panel(const float* block, int64_t n, int64_t n_rows, const float* pivots, float* raw, float* unit) {
  for (int64_t k = 0; k < n_rows; k++) {
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      const vf of_k = load(raw + k * kPanel + j);
      store(unit + k * kPanel + j, of_k / splat(pivots[k]));
      for (int64_t i = k + 1; i < n_rows; i++) {
        float* const p = raw + i * kPanel + j;
        store(p, fma(splat(-block[k * n + i]), of_k, load(p)));
      }
    }
  }
}
