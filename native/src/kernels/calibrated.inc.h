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

// Columns from the last to the first: q[j] = code of w[j] + acc[j], and its error e = w[j] - q scale goes to the columns
// before it, acc[k] += e factor[j][k]. group[j]: whose scale column j has. acc: n * 16 floats of scratch.
void round_with_feedback(const float* w, int64_t n, const int32_t* group, const float* scales, const float* factor,
                         float top, int8_t* q, float* acc) {
  constexpr int64_t kColumns = 32;
  constexpr int kUnroll = kLanes == 16 ? 8 : 4;
  alignas(64) float e[kColumns * 16];
  for (int64_t i = 0; i < n * 16; i++) acc[i] = 0.0f;
  for (int64_t end = n; end > 0;) {
    const int64_t begin = end > kColumns ? end - kColumns : 0;
    for (int64_t j = end - 1; j >= begin; j--) {
      for (int v = 0; v < kVectors; v++) {
        const int64_t at = j * 16 + v * kLanes;
        const vf scale = load(scales + group[j] * 16 + v * kLanes), original = load(w + at);
        const vf code = code_of(original + load(acc + at), scale, top);
        for (int i = 0; i < kLanes; i++) q[at + i] = static_cast<int8_t>(code[i]);
        const vf error = original - code * scale;
        store(e + (j - begin) * 16 + v * kLanes, error);
        for (int64_t k = begin; k < j; k++) {
          float* p = acc + k * 16 + v * kLanes;
          store(p, load(p) + error * splat(factor[j * n + k]));
        }
      }
    }
    const float* rows = factor + begin * n;
    int64_t k = 0;
    for (; k + kUnroll <= begin; k += kUnroll) feed_back<kUnroll>(acc + k * 16, e, end - begin, rows + k, n);
    for (; k < begin; k++) feed_back<1>(acc + k * 16, e, end - begin, rows + k, n);
    end = begin;
  }
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
