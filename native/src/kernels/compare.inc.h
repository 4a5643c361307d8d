// Rows of a coded matrix as float32 (w4-codes 5), and how far two rows are from one another.

// The dwords of one row, so many at a time, side by side: n from `first` on, counted by the columns of a dword. Of codes of
// 3 bits, the fourth dword of 32 columns is made of the three that there are.
constexpr int64_t kRowDwords = 64;
inline void gather_dwords(const Matrix& w, const uint32_t* lines, int64_t first, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t at = first + i;
    if (!is_of_three(w.kind)) {
      out[i] = lines[at * 16];
    } else {
      const uint32_t* const run = lines + at / 4 * 3 * 16;
      out[i] = at % 4 < 3 ? run[at % 4 * 16] : last_of_four(run[0], run[16], run[32]);
    }
  }
  for (int64_t i = n; i < pad_to(n, 16); i++) out[i] = 0;
}

// Values of 8 columns a dword, by the levels that their codes stand for.
inline void look_up_levels(const uint32_t* dwords, int64_t n, const Levels& levels, float* out) {
  constexpr uint32_t kSteps[8] = {0, 8, 16, 24, 4, 12, 20, 28};
  vu steps[8 / kLanes + 1];  // of a dword, or of both of a vector
  vi second = {};            // lanes of the second dword of a vector
  for (int j = 0; j < (kLanes < 8 ? 8 : kLanes); j++) {
    steps[j / kLanes][j % kLanes] = kSteps[j % 8];
    if (j >= 8) second[j % kLanes] = -1;
  }
  for (int64_t k = 0; k < n; k += kLanes) {
    vu bits = splat_bits(dwords[k / 8]);
    if constexpr (kLanes == 16) bits = select_bits(second, splat_bits(dwords[k / 8 + 1]), bits);
    store(out + k, levels.of((vi)(bits >> steps[k % 8 / kLanes])));
  }
}

// Of one row.
inline float scale_at(const Scales& s, int64_t tile, int64_t group, int64_t lane) {
  const int64_t at = (tile * s.n_groups + group) * 16 + lane;
  if (s.type == ScaleType::kF16) return f16_value(static_cast<const uint16_t*>(s.values)[at]);
  if (s.type == ScaleType::kF32) return static_cast<const float*>(s.values)[at];
  const float super = f16_value(s.supers[(tile * s.n_supers + (group >> s.super_shift)) * 16 + lane]);
  const int byte = static_cast<const int8_t*>(s.values)[at];
  return super * static_cast<float>(s.type == ScaleType::kShifted ? static_cast<int8_t>(byte * 4) >> 2 : byte);
}
// What is added to its levels, of kShifted.
inline float shift_at(const Scales& s, int64_t tile, int64_t group, int64_t lane) {
  const int byte = static_cast<const uint8_t*>(s.values)[(tile * s.n_groups + group) * 16 + lane];
  return static_cast<float>(s.shifts.lowest + (byte >> 6) * s.shifts.step);
}

// out: n_columns floats, padded to 16.
void dequantize_row(const Matrix& w, int64_t row, float* out) {
  const int64_t tile = row / kTileRows, lane = row % kTileRows, columns = columns_per_dword(w.kind);
  const uint32_t* lines = w.lines + tile * w.n_lines() * 16 + lane;
  const int64_t n_groups = is_float(w.kind) ? 1 : w.n_groups(), size = is_float(w.kind) ? w.n_columns : w.group_size;
  for (int64_t g = 0; g < n_groups; g++) {
    const int64_t group_end = size < w.n_columns - g * size ? (g + 1) * size : w.n_columns;
    const float scale = is_float(w.kind) ? 1.0f : scale_at(Scales::of(w), tile, g, lane);
    const bool is_shifted = w.scale_type == ScaleType::kShifted;
    const float shift = is_shifted ? shift_at(Scales::of(w), tile, g, lane) : 0.0f;
    const float offset = has_offsets(w.kind) ? scale_at(Scales::of_offsets(w), tile, g, lane) : 0.0f;
    const int zero_point = w.kind == Kind::kInt4z   ? w.zero_points[(tile * n_groups + g) * 16 + lane]
                           : w.kind == Kind::kInt4o ? 0
                                                    : 8;
    alignas(64) float values[16];
    for (int code = 0; code < 16; code++) {
      const float level = is_codebook(w.kind) ? levels_of(w.kind)[code] : static_cast<float>(code - zero_point);
      values[code] = scale * (is_shifted ? level + shift : level);  // a sum with 0 would lose the sign of -0
      if (w.kind == Kind::kInt4o) values[code] += offset;
    }
    const Levels levels(values);
    for (int64_t k = g * size; k < group_end; k += kRowDwords * columns) {
      alignas(64) uint32_t dwords[kRowDwords];
      const int64_t n = group_end - k < kRowDwords * columns ? group_end - k : kRowDwords * columns;
      gather_dwords(w, lines, k / columns, (n + columns - 1) / columns, dwords);
      const auto* bytes = reinterpret_cast<const uint8_t*>(dwords);
      if (columns == 8) {
        look_up_levels(dwords, n, levels, out + k);
      } else if (is_int8(w.kind)) {
        for (int64_t i = 0; i < n; i += kLanes) {
          const vi codes = from_bytes(reinterpret_cast<const int8_t*>(bytes) + i);
          vf x = __builtin_convertvector(codes, vf) * splat(scale);
          if (w.kind == Kind::kInt8o) x += splat(offset);
          store(out + k + i, x);
        }
      } else {
        const Dtype dtype = w.kind == Kind::kF32 ? Dtype::kF32 : w.kind == Kind::kBf16 ? Dtype::kBf16 : Dtype::kF16;
        for (int64_t i = 0; i < n; i += kLanes) store(out + k + i, load_value(bytes, dtype, i));
      }
    }
  }
}

void load_values(const uint8_t* row, Dtype dtype, int64_t n, float* out) {
  int64_t bad_column;
  load_row(row, dtype, n, out, &bad_column);
}

RowDifference compare_rows(const float* x, const float* y, int64_t n, int64_t group_size, double* signal, double* noise,
                           double* cross) {
  constexpr int kParts = 16 / kWideLanes;  // vectors that hold the 16 lanes
  vw top[kParts] = {};
  double largest = 0;
  bool equal = true;
  for (int64_t g = 0; g * group_size < n; g++) {
    const int64_t begin = g * group_size, end = begin + group_size < n ? begin + group_size : n;
    vw sums[3][kParts] = {};
    vi unequal = {};
    auto take = [&](const float* p, const float* q) {
      for (int h = 0; h < kParts; h++) {
        const vw a = doubles_of(p + h * kWideLanes), e = doubles_of(q + h * kWideLanes) - a;
        sums[0][h] += a * a;
        sums[1][h] += e * e;
        sums[2][h] += a * e;
        const vw size = (vw)((vwi)e & INT64_MAX);
        top[h] = size > top[h] ? size : top[h];  // loses a NaN, but the noise has it too
      }
      for (int v = 0; v < kVectors; v++) unequal |= (vi)(load(p + v * kLanes) != load(q + v * kLanes));
    };
    int64_t k = begin;
    for (; k + 16 <= end; k += 16) take(x + k, y + k);
    if (k < end) {  // lanes without a column add zeros
      alignas(64) float p[16] = {}, q[16] = {};
      for (int64_t i = k; i < end; i++) p[i - k] = x[i], q[i - k] = y[i];
      take(p, q);
    }
    for (int i = 0; i < kLanes; i++) equal = equal && unequal[i] == 0;
    double* const out[3] = {signal + g, noise + g, cross + g};
    for (int s = 0; s < 3; s++) {
      // Of 16 lanes the upper half is added to the lower, then of 8, of 4, of 2.
      for (int width = kParts / 2; width > 0; width /= 2) {
        for (int h = 0; h < width; h++) sums[s][h] += sums[s][h + width];
      }
      *out[s] = reduce_lanes<kWideLanes / 2>(sums[s][0], [](vw a, vw b) { return a + b; })[0];
    }
    if (noise[g] != noise[g]) largest = noise[g];
  }
  for (const vw& t : top) {
    for (int i = 0; i < kWideLanes; i++) largest = t[i] > largest ? t[i] : largest;
  }
  return {largest, equal};
}
