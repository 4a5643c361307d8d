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

// n values as float32, with zeros up to a multiple of 16.
inline void load_part(const uint8_t* p, Dtype dtype, int64_t n, float* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load_value(p, dtype, i));
  for (int64_t i = whole; i < pad_to(n, 16); i++) out[i] = i < n ? value_at(p, dtype, i) : 0.0f;
}

// The first NaN or infinity of a row.
inline Bad first_bad(const uint8_t* row, Dtype dtype, int64_t n, int64_t* column) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t size = __builtin_bit_cast(int32_t, value_at(row, dtype, i)) & 0x7FFFFFFF;
    if (size < 0x7F800000) continue;
    *column = i;
    return size > 0x7F800000 ? Bad::kNan : Bad::kInfinite;
  }
  return Bad::kNone;
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


// Of the values of each row: the largest positive one and the most negative one, or zero. Of two numbers with the same
// sign the bits of the larger one are the larger integer, and a NaN has the largest of all.
struct Extremes {
  vi largest[kVectors] = {};
  vu smallest[kVectors];
  Extremes() {
    for (vu& x : smallest) x = splat_bits(0x80000000u);
  }
};

// Columns [begin, begin + n) of a tile as float32 [column][16], with zeros for rows that there are not and for columns up
// to a multiple of 16. From here on the lanes of a vector are rows.
inline Extremes load_columns(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t begin, int64_t n,
                             float* out) {
  constexpr int64_t kStrip = 64;
  alignas(64) float strip[kTileRows][kStrip + 16];
  for (int r = n_rows; r < kTileRows; r++) {
    for (float& x : strip[r]) x = 0;
  }
  Extremes e;
  for (int64_t k = 0; k < n; k += kStrip) {
    const int64_t some = n - k < kStrip ? n - k : kStrip;
    for (int r = 0; r < n_rows; r++) {
      load_part(rows + r * row_nbytes + (begin + k) * dtype_nbytes(dtype), dtype, some, strip[r]);
    }
    for (int v = 0; v < kVectors; v++) {
      for (int64_t c = 0; c < pad_to(some, 16); c += kLanes) {
        vf square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = load(&strip[v * kLanes + i][c]);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) {
          const vf x = square[i];
          store(out + (k + c + i) * kTileRows + v * kLanes, x);
          e.largest[v] = (vi)x > e.largest[v] ? (vi)x : e.largest[v];
          e.smallest[v] = (vu)x > e.smallest[v] ? (vu)x : e.smallest[v];
        }
      }
    }
  }
  return e;
}

// What the scale is before it is rounded to FP16.
template <Kind kKind>
inline vf wanted_scale(vi largest, vu smallest) {
  if constexpr (kKind == Kind::kInt4z) return ((vf)largest - (vf)smallest) / 15.0f;
  const vi extreme = largest > (vi)(smallest & 0x7FFFFFFF) ? largest : (vi)smallest;
  if constexpr (is_codebook(kKind)) return (vf)(extreme & 0x7FFFFFFF);
  return (vf)extreme / (kKind == Kind::kInt8 ? -128.0f : -8.0f);
}

// The codes of a codebook by rising level, and the middles between neighbours: a value in the middle takes the lower one.
struct Codebook {
  float codes[16];  // their bits are meant
  float middles[15];
};
constexpr Codebook make_codebook(const float (&levels)[16], const int (&order)[16]) {
  Codebook out{};
  for (int i = 0; i < 16; i++) out.codes[i] = __builtin_bit_cast(float, order[i]);
  for (int i = 0; i < 15; i++) out.middles[i] = (levels[order[i]] + levels[order[i + 1]]) / 2;
  return out;
}
constexpr Codebook kNf4 = make_codebook(kNf4Levels, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
constexpr Codebook kFp4 = make_codebook(kFp4Levels, {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3});

// x / scale, limited to [lowest, highest].
inline vf level_of(vf x, vf scale, vf lowest, vf highest) {
  const vf level = x / scale;
  return select((vi)(level < lowest), lowest, select((vi)(level > highest), highest, level));
}
constexpr float kMagic = 0x1.8p23f;  // added to a number, it rounds to an integer, half to even, which the low bits hold

// n values of each of kLanes rows to lines.
template <Kind kKind>
inline void code_columns(const float* x, int64_t n, vf scale, vf point, uint32_t* lines) {
  constexpr int kColumns = columns_per_dword(kKind);
  constexpr uint32_t kEach = kColumns == 8 ? 0x11111111 : 0x01010101;  // a dword with each code 1
  constexpr float kLevels = kColumns == 8 ? 16.0f : 256.0f;
  const vi is_zero = (vi)(scale == 0.0f);
  const vf divisor = select(is_zero, splat(1.0f), scale), factor = select(is_zero, vf{}, 1.0f / scale);
  const vf lowest = -point, highest = lowest + (kLevels - 1);
  constexpr const Codebook& kBook = kKind == Kind::kNf4 ? kNf4 : kFp4;
  const Levels codes(kBook.codes);
  // Sums of codes without what kMagic and the point add to each.
  const vu start = is_codebook(kKind) ? vu{} : (vu)(__builtin_convertvector(point, vi) - (vi)splat(kMagic)) * kEach;
  for (int64_t i = 0; i * kColumns < n; i++) {
    vu line = start;
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; j++) {
      const vf value = load(x + (i * kColumns + j) * kTileRows);
      vi code;
      if constexpr (is_codebook(kKind)) {
        const vf v = value * factor;
        vi place = {};
        for (const float middle : kBook.middles) place -= (vi)(v > middle);
        code = (vi)codes.of(place);
      } else {
        code = (vi)(level_of(value, divisor, lowest, highest) + kMagic);
      }
      line += (vu)code << (kColumns == 8 ? j % 4 * 8 + j / 4 * 4 : j * 8);
    }
    store_bits(lines + i * kTileRows, (vi)(kKind == Kind::kInt8 ? line ^ 0x80808080u : line));
  }
}

template <Kind kKind>
TileStatus quantize_tile_as(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns,
                            int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* scratch) {
  constexpr int kColumns = columns_per_dword(kKind);
  vi bad = {}, underflowed = {};
  const auto each_group = [&](const auto& f) {
    for (int64_t begin = 0; begin < n_columns; begin += group_size) {
      f(begin, begin + group_size < n_columns ? group_size : n_columns - begin);
    }
  };
  each_group([&](int64_t begin, int64_t n) {
    const Extremes e = load_columns(rows, row_nbytes, dtype, n_rows, begin, n, scratch);
    for (int v = 0; v < kVectors; v++) {
      vf wanted = wanted_scale<kKind>(e.largest[v], e.smallest[v]);
      const vi size = (vi)wanted & 0x7FFFFFFF;
      bad |= (vi)(size >= 0x477FF000);  // that FP16 rounds to infinity
      const vi is_zero = size <= 0x33000000;  // to zero
      underflowed -= is_zero & (vi)((e.largest[v] | (vi)(e.smallest[v] & 0x7FFFFFFF)) != 0);
      wanted = select(is_zero, vf{}, wanted);
      uint16_t* const half = scales + v * kLanes;
      to_f16(wanted, half);
      const vf scale = from_f16(half);
      vf point = splat(kKind == Kind::kInt8 ? 128.0f : 8.0f);
      if constexpr (kKind == Kind::kInt4z) {
        const vf wanted_point = level_of(-(vf)e.smallest[v], scale, vf{}, splat(15.0f));
        point = select(is_zero, point, wanted_point + kMagic - kMagic);
        *reinterpret_cast<vb_unaligned*>(zero_points + v * kLanes) =
            __builtin_convertvector(__builtin_convertvector(point, vi), vb);
      }
      code_columns<kKind>(scratch + v * kLanes, n, scale, point, lines + v * kLanes);
    }
    scales += kTileRows;
    lines += (n + kColumns - 1) / kColumns * kTileRows;
    if constexpr (kKind == Kind::kInt4z) {
      for (int r = n_rows; r < kTileRows; r++) zero_points[r] = 0;
      zero_points += kTileRows;
    }
  });
  if constexpr (kKind == Kind::kInt4z) {  // the padding code is not that of 0
    const int64_t n_missing = pad_to(n_columns, 8) - n_columns;
    uint32_t* const last = lines - kTileRows;
    for (int64_t j = 8 - n_missing; j < 8; j++) {
      const int shift = static_cast<int>(j % 4 * 8 + j / 4 * 4);
      for (int r = 0; r < kTileRows; r++) last[r] = (last[r] & ~(0xFu << shift)) | 0x8u << shift;
    }
  }
  TileStatus status;
  for (int i = 0; i < kLanes; i++) status.n_underflowed += underflowed[i];
  bool any_bad = false;
  for (int i = 0; i < kLanes; i++) any_bad = any_bad || bad[i];
  for (int r = 0; any_bad && r < n_rows && status.bad == Bad::kNone; r++) {  // the first row that is
    const uint8_t* const row = rows + r * row_nbytes;
    status.row = r;
    status.bad = first_bad(row, dtype, n_columns, &status.column);
    each_group([&](int64_t begin, int64_t n) {
      if (status.bad != Bad::kNone) return;
      const Extremes e = load_columns(row, row_nbytes, dtype, 1, begin, n, scratch);
      if ((f16_bits(wanted_scale<kKind>(e.largest[0], e.smallest[0])[0]) & 0x7FFF) != 0x7C00) return;
      status.bad = Bad::kScale;
      status.column = begin;
    });
  }
  return status;
}

TileStatus quantize_tile(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                         int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* scratch) {
  const auto run = [&](auto tile) {
    return tile(rows, row_nbytes, dtype, n_rows, n_columns, group_size, lines, scales, zero_points, scratch);
  };
  if (kind == Kind::kInt4) return run(quantize_tile_as<Kind::kInt4>);
  if (kind == Kind::kInt4z) return run(quantize_tile_as<Kind::kInt4z>);
  if (kind == Kind::kNf4) return run(quantize_tile_as<Kind::kNf4>);
  if (kind == Kind::kFp4) return run(quantize_tile_as<Kind::kFp4>);
  return run(quantize_tile_as<Kind::kInt8>);
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
