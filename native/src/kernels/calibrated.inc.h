// Rounding that is calibrated on activations. A tile here is 16 rows side by side: column k is the 16 floats at k * 16.
// No product is contracted into an FMA, so that numpy's float32 and float64 give the same bits
// (w4conv/quantization/gptq.py and search.py are the definitions).

// q = x / scale, rounded half to even and clipped to [-top, top - 1]; 0 where the scale is 0.
inline vf code_of(vf x, vf scale, float top) {
  const vf magic = splat(0x1.8p23f);
  vf q = x / scale;
  q = select((vi)(q > splat(top - 1.0f)), splat(top - 1.0f), q);
  q = select((vi)(q < splat(-top)), splat(-top), q);
  q = (q + magic) - magic;
  return select((vi)(scale == vf{}), vf{}, q);
}

inline void clear(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = 0.0f;
}

// acc[k] += e[j] * factor[j][k] for j descending from n_e - 1 to 0, for columns [k, k + kUnroll).
template <int kUnroll>
inline void feed_back(float* acc, const float* e, int64_t n_e, const float* factor, int64_t stride) {
  vf sums[kUnroll][kVectors];
  for (int u = 0; u < kUnroll; u++) {
    for (int v = 0; v < kVectors; v++) sums[u][v] = load(acc + u * 16 + v * kLanes);
  }
  for (int64_t j = n_e - 1; j >= 0; j--) {
    for (int v = 0; v < kVectors; v++) {
      const vf ev = load(e + j * 16 + v * kLanes);
      for (int u = 0; u < kUnroll; u++) sums[u][v] += ev * splat(factor[j * stride + u]);
    }
  }
  for (int u = 0; u < kUnroll; u++) {
    for (int v = 0; v < kVectors; v++) store(acc + u * 16 + v * kLanes, sums[u][v]);
  }
}

// acc[k] += e[j] * factor[j][k] for columns k of [begin, end), likewise.
template <int kUnroll>
inline void feed_columns(float* acc, int64_t begin, int64_t end, const float* e, int64_t n_e, const float* factor,
                         int64_t stride) {
  int64_t k = begin;
  for (; k + kUnroll <= end; k += kUnroll) feed_back<kUnroll>(acc + k * 16, e, n_e, factor + k, stride);
  for (; k < end; k++) feed_back<1>(acc + k * 16, e, n_e, factor + k, stride);
}

// Columns from the last to the first: e = step(j, v, acc of column j) goes to other columns, acc[k] += e factor[j][k]: to
// those before j, or with kAll to every one, j itself too. Blocks of columns, whose order no sum can tell.
template <bool kAll, class Step>
inline void descend(int64_t n, const float* factor, float* acc, Step step) {
  constexpr int64_t kColumns = 32;
  constexpr int kUnroll = kLanes == 16 ? 8 : 4;
  alignas(64) float e[kColumns * 16];
  for (int64_t end = n; end > 0;) {
    const int64_t begin = end > kColumns ? end - kColumns : 0;
    for (int64_t j = end - 1; j >= begin; j--) {
      for (int v = 0; v < kVectors; v++) {
        const vf error = step(j, v, load(acc + j * 16 + v * kLanes));
        store(e + (j - begin) * 16 + v * kLanes, error);
        for (int64_t k = begin; k < (kAll ? end : j); k++) {
          float* p = acc + k * 16 + v * kLanes;
          store(p, load(p) + error * splat(factor[j * n + k]));
        }
      }
    }
    feed_columns<kUnroll>(acc, 0, begin, e, end - begin, factor + begin * n, n);
    if (kAll) feed_columns<kUnroll>(acc, end, n, e, end - begin, factor + begin * n, n);
    end = begin;
  }
}

// q[j] = code of w[j] + acc[j], from the last column to the first, and its error w[j] - q scale goes to the columns before
// it. group[j]: whose scale column j has. acc: n * 16 floats of scratch.
void round_with_feedback(const float* w, int64_t n, const int32_t* group, const float* scales, const float* factor,
                         float top, int8_t* q, float* acc) {
  clear(acc, n * 16);
  descend<false>(n, factor, acc, [&](int64_t j, int v, vf fed) {
    const int64_t at = j * 16 + v * kLanes;
    const vf scale = load(scales + group[j] * 16 + v * kLanes), original = load(w + at);
    const vf code = code_of(original + fed, scale, top);
    for (int i = 0; i < kLanes; i++) q[at + i] = static_cast<int8_t>(code[i]);
    return original - code * scale;
  });
}

// x of x M = b, M unit lower triangular: x[j] = b[j] - acc[j], from the last column to the first. acc: n * 16 floats.
void substitute(float* x, int64_t n, const float* factor, float* acc) {
  clear(acc, n * 16);
  descend<false>(n, factor, acc, [&](int64_t j, int v, vf fed) {
    float* p = x + j * 16 + v * kLanes;
    store(p, load(p) - fed);
    return load(p);
  });
}

// Codes and scales better than they were for the error e h e^T, e = w - q scale, h symmetric with a positive diagonal. In
// each round every scale takes its best value given all else, then every code, from the last to the first.
// scales: [n_groups][16] FP16 bits. scratch: 3 * n * 16 floats.
void refine(const float* w, int64_t n, int64_t group_size, const float* h, float top, int n_rounds, uint16_t* scales,
            int8_t* q, float* scratch) {
  constexpr int kUnroll = kLanes == 16 ? 8 : 4;
  float *const slope = scratch, *const along = slope + n * 16, *const code = along + n * 16;  // slope: e h
  for (int64_t k = 0; k < n; k++) {
    for (int v = 0; v < kVectors; v++) {
      const int64_t at = k * 16 + v * kLanes;
      for (int i = 0; i < kLanes; i++) code[at + i] = q[at + i];
      store(along + at, load(w + at) - load(code + at) * from_f16(scales + k / group_size * 16 + v * kLanes));
    }
  }
  clear(slope, n * 16);
  feed_columns<kUnroll>(slope, 0, n, along, n, h, n);
  for (int round = 0; round < n_rounds; round++) {
    for (int64_t begin = 0; begin < n; begin += group_size) {
      const int64_t end = begin + group_size < n ? begin + group_size : n;
      uint16_t* const bits = scales + begin / group_size * 16;
      clear(along, n * 16);
      feed_columns<kUnroll>(along, 0, n, code + begin * 16, end - begin, h + begin * n, n);
      for (int v = 0; v < kVectors; v++) {
        vf gain = {}, curvature = {};
        for (int64_t k = begin; k < end; k++) {
          const int64_t at = k * 16 + v * kLanes;
          gain += load(code + at) * load(slope + at);
          curvature += load(code + at) * load(along + at);
        }
        const vf before = from_f16(bits + v * kLanes);
        to_f16(before + gain / curvature, bits + v * kLanes);
        vf after = from_f16(bits + v * kLanes);
        after = select((vi)(curvature > vf{}) & (vi)(after - after == vf{}) & (vi)(after != vf{}), after, before);
        to_f16(after, bits + v * kLanes);
        for (int64_t k = 0; k < n; k++) {
          const int64_t at = k * 16 + v * kLanes;
          store(slope + at, load(slope + at) + (before - after) * load(along + at));
        }
      }
    }
    descend<true>(n, h, slope, [&](int64_t j, int v, vf at_j) {
      const int64_t at = j * 16 + v * kLanes;
      const vf scale = from_f16(scales + j / group_size * 16 + v * kLanes), before = load(code + at);
      const vf after = code_of(before * scale + at_j / splat(h[j * n + j]), scale, top);
      store(code + at, after);
      return (before - after) * scale;
    });
  }
  for (int64_t i = 0; i < n * 16; i++) q[i] = static_cast<int8_t>(code[i]);
}

// Scales of one group of n columns: of the candidates base * multipliers[i], base the scale of round-to-nearest, the first
// with the least sum_j pivots[j] r[j]^2, where r[j] = w[j] + acc[j] - q scale with feedback as above inside the group.
// factor: [n][n]. acc: n * 16 floats. scales: 16 FP16 bits. errors: 16 floats.
void search_scales(const float* w, int64_t n, const float* factor, const float* pivots, const float* multipliers,
                   int64_t n_multipliers, float top, uint16_t* scales, float* errors, float* acc) {
  for (int v = 0; v < kVectors; v++) {
    vf largest = load(w + v * kLanes), smallest = largest;
    for (int64_t j = 1; j < n; j++) {
      const vf x = load(w + j * 16 + v * kLanes);
      largest = select((vi)(x > largest), x, largest);
      smallest = select((vi)(x < smallest), x, smallest);
    }
    const vf base = select((vi)(largest > -smallest), largest, smallest) / splat(-top);
    vf best = {}, least = splat(__builtin_inff());
    for (int64_t i = 0; i < n_multipliers; i++) {
      uint16_t bits[kLanes];
      to_f16(base * splat(multipliers[i]), bits);
      const vf scale = from_f16(bits);
      vf error = {};
      for (int64_t j = 0; j < n; j++) store(acc + j * kLanes, vf{});
      for (int64_t j = n - 1; j >= 0; j--) {
        const vf original = load(w + j * 16 + v * kLanes), wanted = original + load(acc + j * kLanes);
        const vf restored = code_of(wanted, scale, top) * scale;
        const vf left = wanted - restored, e = original - restored;
        error += (left * left) * splat(pivots[j]);
        for (int64_t k = 0; k < j; k++) {
          float* p = acc + k * kLanes;
          store(p, load(p) + e * splat(factor[j * n + k]));
        }
      }
      const vi finite = (vi)(scale - scale == vf{});  // not a scale beyond FP16
      const vi better = (vi)(error < least) & finite;
      best = select(better, scale, best);
      least = select(better, error, least);
    }
    best = select((vi)(best == vf{}), vf{}, best);  // +0
    to_f16(best, scales + v * kLanes);
    store(errors + v * kLanes, least);
  }
}

// Rows [row_begin, row_end) of a Cholesky factor, columns [first, first + width), all columns before them being done.
// a: [n][n] lower triangle. panel: [first + width][kPanel], column c = row first + c of the factor. diagonal: the rows are
// those of the panel itself, whose own part of `panel` is written as it comes to be. Returns the first column whose pivot
// is not positive, or -1.
constexpr int kPanel = kCholeskyPanel;
typedef double vd __attribute__((vector_size(64)));
typedef double vd_unaligned __attribute__((vector_size(64), aligned(8), may_alias));

template <int kRows>
inline void subtract_products(double* a, int64_t n, int64_t first, const double* panel) {
  vd sums[kRows][kPanel / 8];
  for (int r = 0; r < kRows; r++) {
    for (int v = 0; v < kPanel / 8; v++) sums[r][v] = *reinterpret_cast<const vd_unaligned*>(a + r * n + first + v * 8);
  }
  for (int64_t k = 0; k < first; k++) {
    for (int v = 0; v < kPanel / 8; v++) {
      const vd p = *reinterpret_cast<const vd_unaligned*>(panel + k * kPanel + v * 8);
      for (int r = 0; r < kRows; r++) sums[r][v] -= p * a[r * n + k];
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int v = 0; v < kPanel / 8; v++) *reinterpret_cast<vd_unaligned*>(a + r * n + first + v * 8) = sums[r][v];
  }
}

int64_t cholesky_rows(double* a, int64_t n, int64_t first, int64_t width, int64_t row_begin, int64_t row_end, bool diagonal,
                      double* panel) {
  int64_t row = row_begin;
  if (width == kPanel) {
    constexpr int kRows = kLanes == 16 ? 4 : 1;  // what the registers hold
    for (; row + kRows <= row_end; row += kRows) subtract_products<kRows>(a + row * n, n, first, panel);
    for (; row < row_end; row++) subtract_products<1>(a + row * n, n, first, panel);
  }
  for (; row < row_end; row++) {  // the last panel may be narrower
    for (int64_t k = 0; k < first; k++) {
      for (int64_t c = 0; c < width; c++) a[row * n + first + c] -= panel[k * kPanel + c] * a[row * n + k];
    }
  }
  for (row = row_begin; row < row_end; row++) {
    double* x = a + row * n + first;
    const int64_t n_before = diagonal ? row - first : width;
    for (int64_t k = 0; k < n_before; k++) {
      double* column = panel + (first + k) * kPanel;
      x[k] /= column[k];
      if (diagonal) column[n_before] = x[k];
      for (int64_t c = k + 1; c < (diagonal ? n_before + 1 : width); c++) x[c] -= x[k] * column[c];
    }
    if (diagonal) {
      if (!(x[n_before] > 0.0)) return row;
      x[n_before] = __builtin_sqrt(x[n_before]);
      panel[(first + n_before) * kPanel + n_before] = x[n_before];
    }
  }
  return -1;
}
