// Conversion of one tile of 16 rows: values -> codes and scales (w4-codes 6), or values -> float lines.

inline vf load_value(const uint8_t* p, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kF32) return load(reinterpret_cast<const float*>(p) + i);
  const auto* half = reinterpret_cast<const uint16_t*>(p) + i;
  if (dtype == Dtype::kF16) return from_f16(half);
  typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
  typedef uint16_t vh_unaligned __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));
  const vh lanes = *reinterpret_cast<const vh_unaligned*>(half);
  return (vf)(__builtin_convertvector(lanes, vu) << 16);
}

inline float value_at(const uint8_t* p, Dtype dtype, int64_t i) {
  alignas(64) uint8_t copy[64] = {};
  const int64_t size = dtype_nbytes(dtype);
  for (int64_t b = 0; b < size; b++) copy[b] = p[i * size + b];
  return load_value(copy, dtype, 0)[0];
}

// One row as float32 in `out`, with zeros up to a multiple of 16. Reports NaN and infinity.
inline Bad load_row(const uint8_t* row, Dtype dtype, int64_t n, float* out, int64_t* bad_column) {
  const int64_t whole = n / kLanes * kLanes;
  vi top = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf x = load_value(row, dtype, i);
    const vi bits = (vi)x & 0x7FFFFFFF;
    top = (vi)select_bits((vi)(bits > top), (vu)bits, (vu)top);
    store(out + i, x);
  }
  int32_t top_bits = 0;
  for (int i = 0; i < kLanes; i++) top_bits = top[i] > top_bits ? top[i] : top_bits;
  for (int64_t i = whole; i < pad_to(n, 16); i++) {
    out[i] = i < n ? value_at(row, dtype, i) : 0.0f;
    const int32_t bits = __builtin_bit_cast(int32_t, out[i]) & 0x7FFFFFFF;
    top_bits = bits > top_bits ? bits : top_bits;
  }
  if (top_bits < 0x7F800000) return Bad::kNone;
  for (int64_t i = 0; i < n; i++) {
    const int32_t bits = __builtin_bit_cast(int32_t, out[i]) & 0x7FFFFFFF;
    if (bits >= 0x7F800000) {
      *bad_column = i;
      return bits > 0x7F800000 ? Bad::kNan : Bad::kInfinite;
    }
  }
  return Bad::kNone;
}

inline uint16_t f16_bits(float x) {
  uint16_t lanes[kLanes];
  to_f16(splat(x), lanes);
  return lanes[0];
}
inline float f16_value(uint16_t bits) { return f16_lanes(splat_bits(bits))[0]; }

struct Extremes {
  float largest, smallest;
};
inline Extremes extremes_of(const float* x, int64_t n) {
  float largest = x[0], smallest = x[0];
  int64_t i = 0;
  if (n >= kLanes) {
    vf high = load(x), low = high;
    for (; i + kLanes <= n; i += kLanes) {
      const vf v = load(x + i);
      high = select((vi)(v > high), v, high);
      low = select((vi)(v < low), v, low);
    }
    largest = folded<kLanes / 2>(high, [](vf a, vf b) { return select((vi)(b > a), b, a); })[0];
    smallest = folded<kLanes / 2>(low, [](vf a, vf b) { return select((vi)(b < a), b, a); })[0];
  }
  for (; i < n; i++) {
    largest = x[i] > largest ? x[i] : largest;
    smallest = x[i] < smallest ? x[i] : smallest;
  }
  return {largest, smallest};
}

// [begin, end) to codes: x / scale rounded half to even within [low, high], and the offset added. A last vector runs past
// the end; the next group, or the padding, writes over it.
inline void round_codes(const float* x, int64_t begin, int64_t end, float scale, float low, float high, int32_t offset,
                        int8_t* out) {
  const vf magic = splat(0x1.8p23f), divisor = splat(scale), lowest = splat(low), highest = splat(high);
  for (int64_t i = begin; i < end; i += kLanes) {
    vf v = load(x + i) / divisor;
    v = select((vi)(v > highest), highest, v);
    v = select((vi)(v < lowest), lowest, v);
    const vi q = (vi)(v + magic) - (vi)magic + offset;
    *reinterpret_cast<vb_unaligned*>(out + i) = __builtin_convertvector(q, vb);
  }
}

// The codes of a codebook by rising level, and the middles between neighbours: a value in the middle takes the lower one.
struct Codebook {
  int8_t order[16];
  float middles[15];
};
constexpr Codebook make_codebook(const float (&levels)[16], const int8_t (&order)[16]) {
  Codebook out{};
  for (int i = 0; i < 16; i++) out.order[i] = order[i];
  for (int i = 0; i < 15; i++) out.middles[i] = (levels[order[i]] + levels[order[i + 1]]) / 2;
  return out;
}
constexpr Codebook kNf4 = make_codebook(kNf4Levels, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
constexpr Codebook kFp4 = make_codebook(kFp4Levels, {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3});

inline void look_up_codes(const float* x, int64_t begin, int64_t end, float scale, const Codebook& book, int8_t* out) {
  const vf factor = splat(1.0f / scale);
  for (int64_t i = begin; i < end; i += kLanes) {
    const vf v = load(x + i) * factor;
    vi place = {};
    for (const float middle : book.middles) place -= (vi)(v > splat(middle));
    for (int j = 0; j < kLanes; j++) out[i + j] = book.order[place[j]];
  }
}

TileStatus quantize_tile(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                         int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* row_scratch,
                         int8_t* byte_scratch) {
  TileStatus status;
  const int columns = columns_per_dword(kind);
  const int64_t n_lines = (n_columns + columns - 1) / columns;
  const int64_t n_groups = (n_columns + group_size - 1) / group_size;
  const float top = kind == Kind::kInt8 ? 128.0f : 8.0f;
  const auto zero = static_cast<int8_t>(zero_code(kind));
  for (int r = 0; r < kTileRows; r++) {
    if (r >= n_rows) {  // padding rows: codes of zero, scales of zero
      for (int64_t i = 0; i < n_lines; i++) lines[i * 16 + r] = 0x11111111u * static_cast<uint32_t>(zero);
      for (int64_t g = 0; g < n_groups; g++) scales[g * 16 + r] = 0;
      for (int64_t g = 0; zero_points != nullptr && g < n_groups; g++) zero_points[g * 16 + r] = 0;
      continue;
    }
    status.bad = load_row(rows + r * row_nbytes, dtype, n_columns, row_scratch, &status.column);
    status.row = r;
    if (status.bad != Bad::kNone) return status;
    for (int64_t g = 0; g < n_groups; g++) {
      const int64_t begin = g * group_size;
      const int64_t end = begin + group_size < n_columns ? begin + group_size : n_columns;
      const Extremes e = extremes_of(row_scratch + begin, end - begin);
      const float extreme = e.largest > -e.smallest ? e.largest : e.smallest;
      const float low = e.smallest < 0 ? e.smallest : 0.0f, high = e.largest > 0 ? e.largest : 0.0f;
      const float wanted = is_codebook(kind)      ? __builtin_fabsf(extreme)
                           : kind == Kind::kInt4z ? (high - low) / 15.0f
                                                  : extreme / -top;
      uint16_t bits = f16_bits(wanted);
      if ((bits & 0x7FFF) == 0) bits = 0;
      if ((bits & 0x7FFF) == 0x7C00) {
        status.bad = Bad::kScale;
        status.column = begin;
        return status;
      }
      scales[g * 16 + r] = bits;
      if (bits == 0) {
        status.n_underflowed += extreme != 0.0f;
        for (int64_t i = begin; i < end; i++) byte_scratch[i] = zero;
        if (zero_points != nullptr) zero_points[g * 16 + r] = static_cast<uint8_t>(zero);
        continue;
      }
      const float scale = f16_value(bits);
      if (is_codebook(kind)) {
        look_up_codes(row_scratch, begin, end, scale, kind == Kind::kNf4 ? kNf4 : kFp4, byte_scratch);
      } else if (kind == Kind::kInt4z) {
        alignas(64) float lowest[kLanes] = {low};
        alignas(64) int8_t point[kLanes];
        round_codes(lowest, 0, 1, -scale, 0.0f, 15.0f, 0, point);
        zero_points[g * 16 + r] = static_cast<uint8_t>(point[0]);
        round_codes(row_scratch, begin, end, scale, -static_cast<float>(point[0]), 15.0f - static_cast<float>(point[0]),
                    point[0], byte_scratch);
      } else {
        round_codes(row_scratch, begin, end, scale, -top, top - 1.0f, zero, byte_scratch);
      }
    }
    for (int64_t i = n_columns; i < n_lines * columns; i++) byte_scratch[i] = zero;
    for (int64_t i = 0; i < n_lines; i++) {
      if (columns == 8) {
        uint64_t codes;
        __builtin_memcpy(&codes, byte_scratch + i * 8, 8);
        lines[i * 16 + r] = static_cast<uint32_t>(codes) | static_cast<uint32_t>(codes >> 32) << 4;
      } else {
        __builtin_memcpy(&lines[i * 16 + r], byte_scratch + i * 4, 4);
      }
    }
  }
  return status;
}

// float32 -> BF16, half to even.
inline uint16_t bf16_bits(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

TileStatus pack_tile(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                     uint32_t* lines, float* row_scratch, uint8_t* byte_scratch) {
  TileStatus status;
  const int columns = columns_per_dword(kind);
  const int64_t n_lines = (n_columns + columns - 1) / columns;
  for (int r = 0; r < kTileRows; r++) {
    if (r >= n_rows) {
      for (int64_t i = 0; i < n_lines; i++) lines[i * 16 + r] = 0;
      continue;
    }
    status.row = r;
    status.bad = load_row(rows + r * row_nbytes, dtype, n_columns, row_scratch, &status.column);
    if (status.bad != Bad::kNone) return status;
    auto* half = reinterpret_cast<uint16_t*>(byte_scratch);
    const int64_t padded = pad_to(n_columns, 16);
    if (kind == Kind::kF16) {
      for (int64_t i = 0; i < padded; i += kLanes) to_f16(load(row_scratch + i), half + i);
    } else if (kind == Kind::kBf16) {
      for (int64_t i = 0; i < padded; i++) half[i] = bf16_bits(row_scratch[i]);
    } else {
      __builtin_memcpy(byte_scratch, row_scratch, static_cast<size_t>(n_columns) * 4);
    }
    if (kind != Kind::kF32) {
      const uint16_t infinity = kind == Kind::kF16 ? 0x7C00 : 0x7F80;
      for (int64_t i = 0; i < n_columns; i++) {
        if ((half[i] & 0x7FFF) == infinity) {
          status.bad = Bad::kValue;
          status.column = i;
          return status;
        }
      }
    }
    for (int64_t i = 0; i < n_lines; i++) __builtin_memcpy(&lines[i * 16 + r], byte_scratch + i * 4, 4);
  }
  return status;
}
