// Conversion of one tile of 16 rows: values -> codes and scales (w4-codes 6), or values -> float lines.

inline vf load_value(const uint8_t* p, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kF32) return load(reinterpret_cast<const float*>(p) + i);
  const auto* half = reinterpret_cast<const uint16_t*>(p) + i;
  if (dtype == Dtype::kF16) return from_f16(half);
  return (vf)(from_u16(half) << 16);
}

inline float value_at(const uint8_t* p, Dtype dtype, int64_t i) {
  alignas(64) uint8_t copy[64] = {};
  const int64_t size = dtype_nbytes(dtype);
  for (int64_t b = 0; b < size; b++) copy[b] = p[i * size + b];
  return load_value(copy, dtype, 0)[0];
}

// The first NaN or infinity of a row.
inline Status first_not_finite(const uint8_t* row, Dtype dtype, int64_t n, int64_t* column) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t size = __builtin_bit_cast(int32_t, value_at(row, dtype, i)) & 0x7FFFFFFF;
    if (size < 0x7F800000) continue;
    *column = i;
    return size > 0x7F800000 ? Status::kNan : Status::kInfinite;
  }
  return Status::kOk;
}

// One row as float32 in `out`, with zeros up to a multiple of 16. Reports NaN and infinity.
inline Status load_row(const uint8_t* row, Dtype dtype, int64_t n, float* out, int64_t* bad_column) {
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
  return top_bits < 0x7F800000 ? Status::kOk : first_not_finite(row, dtype, n, bad_column);
}

inline float f16_value(uint16_t bits) { return f16_lanes(splat_bits(bits))[0]; }

// Of each row of a tile: its largest value, or 0 where that is negative, and its smallest one, or -0. Among numbers of one
// sign the larger magnitude is the larger integer, so these are found as integers, and a NaN wins.
struct Extremes {
  vi largest[kVectors] = {};
  vu smallest[kVectors];
  Extremes() {
    for (vu& x : smallest) x = splat_bits(0x80000000u);
  }
  void take(int v, vf x) {
    largest[v] = (vi)x > largest[v] ? (vi)x : largest[v];
    smallest[v] = (vu)x > smallest[v] ? (vu)x : smallest[v];
  }
};

// n columns of the rows of a tile as float32, [column][16]; zeros stand for rows and, up to a multiple of 16, columns that
// there are not. From here on the lanes of a vector are rows.
template <Dtype kDtype>
inline Extremes load_columns_as(const uint8_t* rows, int64_t row_nbytes, int n_rows, int64_t n, float* out) {
  Extremes e;
  for (int64_t c = 0; c < pad_to(n, 16); c += kLanes) {
    for (int v = 0; v < kVectors; v++) {
      const int first = v * kLanes;
      vf square[kLanes];
      if (first + kLanes <= n_rows && c + kLanes <= n) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = load_value(rows + (first + i) * row_nbytes, kDtype, c);
      } else {
        alignas(64) float some[kLanes][kLanes] = {};
        for (int i = 0; i < kLanes && first + i < n_rows; i++) {
          for (int j = 0; j < kLanes && c + j < n; j++)
            some[i][j] = value_at(rows + (first + i) * row_nbytes, kDtype, c + j);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = load(some[i]);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) {
        store(out + (c + i) * kTileRows + first, square[i]);
        e.take(v, square[i]);
      }
    }
  }
  return e;
}
inline Extremes load_columns(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n, float* out) {
  auto* const load_as = dtype == Dtype::kF16    ? load_columns_as<Dtype::kF16>
                        : dtype == Dtype::kBf16 ? load_columns_as<Dtype::kBf16>
                                                : load_columns_as<Dtype::kF32>;
  return load_as(rows, row_nbytes, n_rows, n, out);
}

// What the scale is before it is rounded to FP16.
template <Kind kKind>
inline vf wanted_scale(vi largest, vu smallest) {
  if constexpr (kKind == Kind::kInt4z) return ((vf)largest - (vf)smallest) / 15.0f;
  const vi extreme = largest > (vi)(smallest & 0x7FFFFFFF) ? largest : (vi)smallest;
  if constexpr (is_codebook(kKind)) return (vf)(extreme & 0x7FFFFFFF);
  return (vf)extreme / (kKind == Kind::kInt8 ? -128.0f : -8.0f);
}
// As bits without sign: what FP16 rounds to zero, at most, and to infinity, at least.
constexpr int32_t kF16Zero = 0x33000000, kF16Infinity = 0x477FF000;

// The codes of a codebook by rising level, and the middles between neighbours: a value in the middle takes the lower one.
struct Codebook {
  float codes[16];  // as bits
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

// x / scale within [lowest, highest]. Added to it, kMagic rounds it to an integer, half to even, in the low bits.
inline vf limited_level(vf x, vf scale, vf lowest, vf highest) {
  const vf level = x / scale;
  return select((vi)(level < lowest), lowest, select((vi)(level > highest), highest, level));
}
constexpr float kMagic = 0x1.8p23f;

// n columns of kLanes rows to lines. point: what is added to a level to make it a code above 0; of codebooks, nothing.
// Where the scale is 0, values that it came of are too small for a level other than 0 of any scale.
template <Kind kKind>
inline void code_columns(const float* x, int64_t n, vf scale, vf point, uint32_t* lines) {
  constexpr int kColumns = columns_per_dword(kKind);
  constexpr uint32_t kOnes = kColumns == 8 ? 0x11111111 : 0x01010101;
  const vi no_scale = (vi)(scale == 0.0f);
  const vf divisor = select(no_scale, splat(1.0f), scale), factor = select(no_scale, vf{}, 1.0f / scale);
  const vf lowest = -point, highest = lowest + (kColumns == 8 ? 15.0f : 255.0f);
  constexpr const Codebook& kBook = kKind == Kind::kNf4 ? kNf4 : kFp4;
  const Levels codes(kBook.codes);
  // A line is a sum of shifted codes: it begins with what is to be added to the bits of each.
  const vu start = is_codebook(kKind) ? vu{} : (vu)(__builtin_convertvector(point, vi) - (vi)splat(kMagic)) * kOnes;
  for (int64_t i = 0; i * kColumns < n; i++) {
    vu line = start;
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; j++) {
      const vf value = load(x + (i * kColumns + j) * kTileRows);
      vi code;
      if constexpr (is_codebook(kKind)) {
        const vf level = value * factor;
        vi rank = {};
        for (const float middle : kBook.middles) rank -= (vi)(level > middle);
        code = (vi)codes.of(rank);
      } else {
        code = (vi)(limited_level(value, divisor, lowest, highest) + kMagic);
      }
      line += (vu)code << (kColumns == 8 ? j % 4 * 8 + j / 4 * 4 : j * 8);
    }
    if constexpr (kKind == Kind::kInt8) line ^= 0x80808080u;  // its codes are the levels themselves
    store_bits(lines + i * kTileRows, (vi)line);
  }
}

template <Kind kKind>
TileStatus quantize_tile_as(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns,
                            int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* scratch) {
  constexpr int kColumns = columns_per_dword(kKind);
  const auto each_group = [&](const auto& f) {
    for (int64_t begin = 0; begin < n_columns; begin += group_size) {
      f(begin, begin + group_size < n_columns ? group_size : n_columns - begin);
    }
  };
  vi bad = {}, underflowed = {};
  each_group([&](int64_t begin, int64_t n) {
    const Extremes e = load_columns(rows + begin * dtype_nbytes(dtype), row_nbytes, dtype, n_rows, n, scratch);
    for (int v = 0; v < kVectors; v++) {
      const vf wanted = wanted_scale<kKind>(e.largest[v], e.smallest[v]);
      const vi size = (vi)wanted & 0x7FFFFFFF, too_small = (vi)(size <= kF16Zero);
      bad |= (vi)(size >= kF16Infinity);
      underflowed -= too_small & (vi)((e.largest[v] | (vi)(e.smallest[v] & 0x7FFFFFFF)) != 0);
      to_f16(select(too_small, vf{}, wanted), scales + v * kLanes);
      const vf scale = from_f16(scales + v * kLanes);
      vf point = splat(kKind == Kind::kInt8 ? 128.0f : 8.0f);
      if constexpr (kKind == Kind::kInt4z) {
        const vf level = limited_level(-(vf)e.smallest[v], scale, vf{}, splat(15.0f));
        point = select(too_small, point, level + kMagic - kMagic);
        *reinterpret_cast<vb_unaligned*>(zero_points + v * kLanes) = low_bytes(__builtin_convertvector(point, vi));
      }
      code_columns<kKind>(scratch + v * kLanes, n, scale, point, lines + v * kLanes);
    }
    lines += (n + kColumns - 1) / kColumns * kTileRows;
    scales += kTileRows;
    if constexpr (kKind == Kind::kInt4z) {
      for (int r = n_rows; r < kTileRows; r++) zero_points[r] = 0;
      zero_points += kTileRows;
    }
  });
  if constexpr (kKind == Kind::kInt4z) {  // the code of padding columns is not that of a 0
    for (int64_t j = (n_columns - 1) % kColumns + 1; j < kColumns; j++) {
      const int64_t shift = j % 4 * 8 + j / 4 * 4;
      for (int i = -kTileRows; i < 0; i++) lines[i] = (lines[i] & ~(0xFu << shift)) | 0x8u << shift;
    }
  }
  TileStatus status;
  bool is_bad = false;
  for (int i = 0; i < kLanes; i++) {
    status.n_underflowed += underflowed[i];
    is_bad = is_bad || bad[i];
  }
  // Of the first row with a bad value or scale the first value, or else the first scale.
  for (int r = 0; is_bad && r < n_rows && status.status == Status::kOk; r++) {
    const uint8_t* const row = rows + r * row_nbytes;
    status.row = r;
    status.status = first_not_finite(row, dtype, n_columns, &status.column);
    each_group([&](int64_t begin, int64_t n) {
      if (status.status != Status::kOk) return;
      const Extremes e = load_columns(row + begin * dtype_nbytes(dtype), row_nbytes, dtype, 1, n, scratch);
      const vi size = (vi)wanted_scale<kKind>(e.largest[0], e.smallest[0]) & 0x7FFFFFFF;
      if (size[0] < kF16Infinity) return;
      status.status = Status::kScale;
      status.column = begin;
    });
  }
  return status;
}

TileStatus quantize_tile(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                         int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* scratch) {
  const auto run = [&](auto quantize_as) {
    return quantize_as(rows, row_nbytes, dtype, n_rows, n_columns, group_size, lines, scales, zero_points, scratch);
  };
  switch (kind) {
    case Kind::kInt4:
      return run(quantize_tile_as<Kind::kInt4>);
    case Kind::kInt4z:
      return run(quantize_tile_as<Kind::kInt4z>);
    case Kind::kNf4:
      return run(quantize_tile_as<Kind::kNf4>);
    case Kind::kFp4:
      return run(quantize_tile_as<Kind::kFp4>);
    case Kind::kInt8:
      return run(quantize_tile_as<Kind::kInt8>);
    case Kind::kInt4o:
    case Kind::kE2m1:
    case Kind::kIq4nl:
    case Kind::kInt8o:  // only taken over from packed checkpoints
    case Kind::kNl4:
    case Kind::kNl3:  // search_scales
    case Kind::kF16:
    case Kind::kBf16:
    case Kind::kF32:  // pack_tile
      break;
  }
  unknown("kind of weights");
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
    status.status = load_row(rows + r * row_nbytes, dtype, n_columns, row_scratch, &status.column);
    if (status.status != Status::kOk) return status;
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
          status.status = Status::kValue;
          status.column = i;
          return status;
        }
      }
    }
    for (int64_t i = 0; i < n_lines; i++) __builtin_memcpy(&lines[i * 16 + r], byte_scratch + i * 4, 4);
  }
  return status;
}
