// Products of a tiled weight matrix with prepared activations. A lane is a row, so sums never cross lanes.
//
// Integer form (docs/numerics.md 2): y += float(isum) * (w_scale * a_scale), blocks of columns ascending; of int4o then
// y += float(asum) * (w_offset * a_scale).
// Float form (3): one chain of fused multiply-adds a row, or a block of it, columns ascending.
// GEMV (up to kTokens tokens, of floats one) unpacks in registers, several tiles side by side: so many streams keep more of
// memory busy than one. GEMM unpacks a block of kGemmTiles tiles into the cache and runs all tokens over it.

constexpr int64_t kPrefetchOctets = 16;  // columns / 8 that a GEMV fetches ahead

struct Scales {
  const void* values;
  bool wide;
  vf lanes(int64_t index) const {
    return wide ? load(static_cast<const float*>(values) + index) : from_f16(static_cast<const uint16_t*>(values) + index);
  }
};

inline vi zero_point_lanes(const uint8_t* p) {
  typedef uint8_t vub __attribute__((vector_size(kLanes)));
  typedef uint8_t vub_unaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector((vub) * reinterpret_cast<const vub_unaligned*>(p), vi);
}

// ---- shared by the GEMMs ---------------------------------------------------------------------------------------------

// f(tile, n_tiles, first token, n_tokens) over parts that fit the scratch memory.
template <class F>
inline void for_parts(int64_t tile, int64_t tile_end, int64_t n_tokens, const F& f) {
  for (; tile < tile_end; tile += kGemmTiles) {
    for (int64_t m = 0; m < n_tokens; m += kMaxTokens) {
      f(tile, tile_end - tile < kGemmTiles ? tile_end - tile : kGemmTiles, m,
        n_tokens - m < kMaxTokens ? n_tokens - m : kMaxTokens);
    }
  }
}

// sums [panel][token][tile][16] -> rows of y. A panel is kTiles tiles; the last one may have fewer, and then has one.
inline void write_sums(const float* sums, int64_t n_tokens, int64_t n_tiles, float* y, int64_t ldy) {
  for (int64_t j = 0; j < n_tiles; j += kTiles) {
    const int64_t width = (n_tiles - j < kTiles ? 1 : kTiles) * kTileRows;
    for (int64_t m = 0; m < n_tokens; m++) {
      for (int64_t i = 0; i < width; i += kLanes) store(y + m * ldy + j * kTileRows + i, load(sums + i));
      sums += width;
    }
  }
}

// ---- unpacking ------------------------------------------------------------------------------------------------------

// The pairs (0,2) (4,6) (1,3) (5,7) of a line of 4-bit codes, as int16 codes 0..15.
template <int kPair>
inline vi nibble_pair(vi line) {
  constexpr int kShift = 4 * kPair;
  if constexpr (kPair == 3) return (vi)((vsu)line >> kShift);
  return (vi)(((vu)line >> kShift) & 0x000F000Fu);
}
// The columns 0..3 or 4..7 of a line of 4-bit codes, as bytes.
template <int kHalf>
inline vi nibble_bytes(vi line) {
  constexpr int kShift = 4 * kHalf;
  return (vi)(((vu)line >> kShift) & 0x0F0F0F0Fu);
}
// The pairs (0,2) (1,3) of a dword of signed bytes, sign-extended to int16.
template <int kPair>
inline vi byte_pair(vi line) {
  const vs words = (vs)line;
  return kPair == 0 ? (vi)((vs)(words << 8) >> 8) : (vi)(words >> 8);
}
// Weights that are signed bytes, as they are or looked up.
constexpr bool is_bytes(Kind kind) { return kind == Kind::kInt8 || kind == Kind::kE2m1; }
// Where dot_bytes takes any byte, those weights w enter it as w + 128.
constexpr bool biased(Kind kind) { return kWideBytes && is_bytes(kind); }
// What a block's integers are multiplied with, next to the scale of the activations.
template <Kind kKind>
inline vf weight_scale(const Scales& scales, int64_t index) {
  return kKind == Kind::kE2m1 ? scales.lanes(index) * 0.5f : scales.lanes(index);
}

// Column c of a float line.
template <Kind kKind, int kColumn>
inline vf float_column(vi line) {
  if constexpr (kKind == Kind::kF32) return (vf)line;
  if constexpr (kKind == Kind::kBf16) return (vf)(kColumn == 0 ? (vu)line << 16 : (vu)line & 0xFFFF0000u);
  if constexpr (kKind == Kind::kF16) return f16_lanes(kColumn == 0 ? (vu)line & 0xFFFFu : (vu)line >> 16);
}
// The level of column c of a line of codes.
template <int kColumn>
inline vf level_column(const Levels& levels, vi line) {
  constexpr int kShift = 8 * (kColumn % 4) + 4 * (kColumn / 4);
  return levels.of((vi)((vu)line >> kShift));
}

// Columns [column, column + n_columns) of kTilesNow tiles -> out [dword of activations][tile][16]: int16 pairs less their
// offset, or bytes with it.
template <Kind kKind, int kBits, int kTilesNow>
void unpack_int(const Matrix& w, int64_t tile, int64_t column, int64_t n_columns, const vi* zero_points, uint32_t* out) {
  constexpr int kLines = kKind == Kind::kInt8 ? 2 : 1, kDwords = kBits / 4;  // of 8 columns
  const int64_t n_lines = w.n_lines(), n_octets = pad_to(n_columns, 8) / 8;
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) {
      const uint32_t* line = w.lines + ((tile + j) * n_lines + column / 8 * kLines) * 16 + v * kLanes;
      const uint32_t* const last = w.lines + ((tile + j) * n_lines + n_lines - 1) * 16 + v * kLanes;
      const vi offset = kKind == Kind::kInt4z   ? zero_points[j * kVectors + v] * 0x10001
                        : kKind == Kind::kInt4o ? vi{}
                                                : splat_int(0x00080008);
      uint32_t* to = out + j * 16 + v * kLanes;
      for (int64_t i = 0; i < n_octets; i++, line += kLines * 16, to += kDwords * kTilesNow * 16) {
        auto put = [&](int dword, vi x) { store_bits(to + dword * kTilesNow * 16, x); };
        vi x = load_bits(line);
        if constexpr (is_bytes(kKind)) {
          vi y = {};
          if constexpr (kKind == Kind::kE2m1) {
            y = doubled_e2m1(nibble_bytes<1>(x)), x = doubled_e2m1(nibble_bytes<0>(x));
          } else if (line < last) {
            y = load_bits(line + 16);
          }
          if constexpr (kBits == 16) {
            put(0, byte_pair<0>(x)), put(1, byte_pair<0>(y)), put(2, byte_pair<1>(x)), put(3, byte_pair<1>(y));
          } else {
            const vi bias = splat_int(biased(kKind) ? static_cast<int32_t>(0x80808080u) : 0);
            put(0, x ^ bias), put(1, y ^ bias);
          }
        } else if constexpr (kBits == 16) {
          prefetch(line + kPrefetchOctets * 16);
          put(0, (vi)((vs)nibble_pair<0>(x) - (vs)offset)), put(1, (vi)((vs)nibble_pair<1>(x) - (vs)offset));
          put(2, (vi)((vs)nibble_pair<2>(x) - (vs)offset)), put(3, (vi)((vs)nibble_pair<3>(x) - (vs)offset));
        } else {
          prefetch(line + kPrefetchOctets * 16);
          put(0, nibble_bytes<0>(x)), put(1, nibble_bytes<1>(x));
        }
      }
    }
  }
}

// Columns [column, column + n_columns) of kTilesNow tiles -> out [column][tile][16] (float32).
template <Kind kKind, int kTilesNow>
void unpack_float(const Matrix& w, int64_t tile, int64_t column, int64_t n_columns, float* out) {
  constexpr int kColumns = columns_per_dword(kKind);
  const Levels levels(levels_of(kKind));
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) {
      const uint32_t* line = w.lines + ((tile + j) * w.n_lines() + column / kColumns) * 16 + v * kLanes;
      float* to = out + j * 16 + v * kLanes;
      for (int64_t k = 0; k < n_columns; k += kColumns, line += 16) {
        auto put = [&](int c, vf x) { store(to + (k + c) * kTilesNow * 16, x); };
        const vi x = load_bits(line);
        if constexpr (is_codebook(kKind)) {
          put(0, level_column<0>(levels, x)), put(1, level_column<1>(levels, x)), put(2, level_column<2>(levels, x));
          put(3, level_column<3>(levels, x)), put(4, level_column<4>(levels, x)), put(5, level_column<5>(levels, x));
          put(6, level_column<6>(levels, x)), put(7, level_column<7>(levels, x));
        } else {
          put(0, float_column<kKind, 0>(x));
          if constexpr (kColumns == 2) put(1, float_column<kKind, 1>(x));
        }
      }
    }
  }
}

// ---- integers -------------------------------------------------------------------------------------------------------

// Eight columns with activations of 8 bits.
template <Kind kKind>
inline vi eight_products(vi acc, vi w0, vi a0, vi w1, vi a1) {
  if constexpr (is_bytes(kKind) && !kWideBytes) {
    acc = dot(dot(acc, byte_pair<0>(w0), byte_pair<0>(a0)), byte_pair<1>(w0), byte_pair<1>(a0));
    return dot(dot(acc, byte_pair<0>(w1), byte_pair<0>(a1)), byte_pair<1>(w1), byte_pair<1>(a1));
  }
  return dot_bytes(acc, w0, a0, w1, a1);
}

// What codes that are stored with an offset leave to be taken off a block's sum.
template <Kind kKind, int kBits>
inline vi start_of_sum(int32_t neg8_sum, vi zero_points) {
  if constexpr (kKind == Kind::kInt4) return splat_int(neg8_sum);
  if constexpr (kKind == Kind::kInt4z) return zero_points * neg8_sum >> 3;
  return splat_int(kBits == 8 && biased(kKind) ? 16 * neg8_sum : 0);
}

// What the offsets of a block's weights are multiplied with, next to the block's scale.
inline vf sum_of_activations(int32_t neg8_sum) { return splat(static_cast<float>(-(neg8_sum / 8))); }

struct IntBlock {
  const uint32_t* weights;  // unpacked
  const vf* w_scales;
  const vi* zero_points;
  int64_t n_dwords;
  const uint32_t* dwords;  // of the first token
  const float* a_scales;
  const int32_t* neg8_sums;
  int64_t stride;  // tokens in the group
};

// sums [token][tile][16] += a block's products. Inlined: as a function of its own it ran at 0.93 of the speed.
template <Kind kKind, int kBits, int kTilesNow, int kTokensNow>
[[gnu::always_inline]] inline void int_inner(const IntBlock& b, float* sums) {
  constexpr int kV = kTilesNow * kVectors;
  vf w_scales[kV];
#pragma GCC unroll 4
  for (int v = 0; v < kV; v++) w_scales[v] = b.w_scales[v];
  vi acc[kTokensNow][kV];
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) {
      if constexpr (kBits == 16) acc[t][v] = vi{};
      if constexpr (kBits == 8) acc[t][v] = start_of_sum<kKind, kBits>(b.neg8_sums[t], b.zero_points[v]);
    }
  }
  const uint32_t* a = b.dwords;
  const uint32_t* w = b.weights;
  if constexpr (kBits == 16) {
    for (int64_t p = 0; p < b.n_dwords; p++, a += b.stride, w += kV * kLanes) {
      vi wv[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; v++) wv[v] = load_bits(w + v * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        const vi av = splat_int(static_cast<int32_t>(a[t]));
#pragma GCC unroll 4
        for (int v = 0; v < kV; v++) acc[t][v] = dot(acc[t][v], wv[v], av);
      }
    }
  } else {
    for (int64_t p = 0; p < b.n_dwords; p += 2, a += 2 * b.stride, w += 2 * kV * kLanes) {
      vi w0[kV], w1[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; v++) w0[v] = load_bits(w + v * kLanes), w1[v] = load_bits(w + (kV + v) * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        const vi a0 = splat_int(static_cast<int32_t>(a[t])), a1 = splat_int(static_cast<int32_t>(a[b.stride + t]));
#pragma GCC unroll 4
        for (int v = 0; v < kV; v++) acc[t][v] = eight_products<kKind>(acc[t][v], w0[v], a0, w1[v], a1);
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
    const vf a_scale = splat(b.a_scales[t]);
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) {
      float* sum = sums + (t * kV + v) * kLanes;
      store(sum, load(sum) + __builtin_convertvector(acc[t][v], vf) * (w_scales[v] * a_scale));
    }
  }
}

template <Kind kKind, int kBits, int kTilesNow, int kTokensNow>
[[gnu::always_inline]] inline void int_inner_up_to(int64_t n, const IntBlock& b, float* sums) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) return int_inner_up_to<kKind, kBits, kTilesNow, kTokensNow - 1>(n, b, sums);
  }
  int_inner<kKind, kBits, kTilesNow, kTokensNow>(b, sums);
}

// All tokens of a group of up to kTokenGroup.
template <Kind kKind, int kBits, int kTilesNow>
void int_group(IntBlock b, float* sums) {
  constexpr int kNow = kBits == 8 ? kByteTokens : kTokens;
  // Codes of 16 bits come without their offset, so that one kernel serves all kinds.
  constexpr Kind kAs = kBits == 8 ? kKind : Kind::kInt8;
  for (int64_t t = 0; t < b.stride; t += kNow) {
    int_inner_up_to<kAs, kBits, kTilesNow, kNow>(b.stride - t < kNow ? b.stride - t : kNow, b, sums);
    b.dwords += kNow, b.a_scales += kNow, b.neg8_sums += kNow, sums += kNow * kTilesNow * kTileRows;
  }
}

// sums [token][tile][16] += what the offsets make of a block's activations.
template <int kTilesNow>
void add_offsets(const IntBlock& b, const vf* w_offsets, float* sums) {
  for (int64_t t = 0; t < b.stride; t++) {
    const vf a_scale = splat(b.a_scales[t]), a_sum = sum_of_activations(b.neg8_sums[t]);
    for (int v = 0; v < kTilesNow * kVectors; v++, sums += kLanes) {
      store(sums, load(sums) + a_sum * (w_offsets[v] * a_scale));
    }
  }
}

// n_tiles <= kGemmTiles, tokens [first, first + n_tokens) with n_tokens <= kMaxTokens, `first` a multiple of kTokenGroup.
template <Kind kKind, int kBits>
void int_gemm(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles, int64_t first,
              int64_t n_tokens, uint32_t* scratch) {
  auto* const sums = reinterpret_cast<float*>(scratch + kGemmTiles * kTileRows * kBlock);  // [panel][token][tile][16]
  for (int64_t i = 0; i < n_tokens * n_tiles * kTileRows; i += kLanes) store(sums + i, vf{});
  const Scales scales{w.scales, w.wide_scales}, offsets{w.offsets, w.wide_scales};
  const int64_t n_groups = w.n_groups(), n_blocks = x.n_blocks(), n_dwords = x.n_dwords();
  for (int64_t block = 0; block < n_blocks; block++) {
    const int64_t column = block * x.block;
    const int64_t n_columns = column + x.block < w.n_columns ? x.block : w.n_columns - column;
    vf w_scales[kGemmTiles * kVectors], w_offsets[kGemmTiles * kVectors];
    vi zero_points[kGemmTiles * kVectors] = {};
    for (int64_t j = 0; j < n_tiles; j++) {
      const int64_t at = ((tile + j) * n_groups + column / w.group_size) * 16;
      for (int v = 0; v < kVectors; v++) {
        w_scales[j * kVectors + v] = weight_scale<kKind>(scales, at + v * kLanes);
        if (kKind == Kind::kInt4z) zero_points[j * kVectors + v] = zero_point_lanes(w.zero_points + at + v * kLanes);
        if (kKind == Kind::kInt4o) w_offsets[j * kVectors + v] = offsets.lanes(at + v * kLanes);
      }
    }
    for (int64_t j = 0; j < n_tiles; j += kTiles) {
      uint32_t* const out = scratch + j * kTileRows * kBlock;
      n_tiles - j < kTiles
          ? unpack_int<kKind, kBits, 1>(w, tile + j, column, n_columns, zero_points + j * kVectors, out)
          : unpack_int<kKind, kBits, kTiles>(w, tile + j, column, n_columns, zero_points + j * kVectors, out);
    }
    for (int64_t m = first; m < first + n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      for (int64_t j = 0; j < n_tiles; j += kTiles) {
        const int64_t n_now = n_tiles - j < kTiles ? 1 : kTiles;
        float* const out = sums + (j * n_tokens + (m - first) * n_now) * kTileRows;
        const IntBlock b = {scratch + j * kTileRows * kBlock,
                            w_scales + j * kVectors,
                            zero_points + j * kVectors,
                            pad_to(n_columns, 8) * kBits / 32,
                            x.dwords + m * n_dwords + column * kBits / 32 * n,
                            x.scales + m * n_blocks + block * n,
                            x.neg8_sums + m * n_blocks + block * n,
                            n};
        n_now < kTiles ? int_group<kKind, kBits, 1>(b, out) : int_group<kKind, kBits, kTiles>(b, out);
        if constexpr (kKind == Kind::kInt4o) {
          n_now < kTiles ? add_offsets<1>(b, w_offsets + j * kVectors, out)
                         : add_offsets<kTiles>(b, w_offsets + j * kVectors, out);
        }
      }
    }
  }
  write_sums(sums, n_tokens, n_tiles, y + first * ldy + tile * kTileRows, ldy);
}

// 8 columns of one vector of rows, as they are stored: x, and of kinds of whole bytes y. Of those of 4 bits that are looked
// up, the bytes that they stand for.
struct Octet {
  vi x, y;
};
template <Kind kKind>
inline Octet load_octet(const uint32_t* line, int64_t next) {
  Octet o = {load_bits(line), vi{}};
  keep(o.x);
  if constexpr (kKind == Kind::kInt8) {
    o.y = load_bits(line + next);
    keep(o.y);
  }
  if constexpr (kKind == Kind::kE2m1) o = {doubled_e2m1(nibble_bytes<0>(o.x)), doubled_e2m1(nibble_bytes<1>(o.x))};
  return o;
}
// Their operand for dword kDword of the activations. kApart: of codes of 4 bits, those of odd dwords stay where they are in
// their bytes, 16 times as large as they should be, which saves shifts.
template <Kind kKind, int kBits, bool kApart, int kDword>
inline vi operand(const Octet& o) {
  if constexpr (is_bytes(kKind)) {
    const vi half = kDword % 2 == 0 ? o.x : o.y;
    if constexpr (kBits == 16) return byte_pair<kDword / 2>(half);
    return half ^ splat_int(biased(kKind) ? static_cast<int32_t>(0x80808080u) : 0);
  } else if constexpr (kBits == 8) {
    return nibble_bytes<kDword>(o.x);
  } else if constexpr (kApart) {
    return (vi)((vu)o.x >> kDword / 2 * 8) & (kDword % 2 == 0 ? 0x000F000F : 0x00F000F0);
  } else {
    return nibble_pair<kDword>(o.x);
  }
}
// Their products with the activations a [dword][token], from kDword on, for vectors of rows from `first` on. kApart: `odd`
// is the sum of the odd dwords'. (Kept, or GCC adds several products to one another before it adds them to the sum, for
// which there are too few registers.)
template <Kind kKind, int kBits, bool kApart, int kDword = 0, int kN, int kTokensNow, int kV>
[[gnu::always_inline]] inline void add_octets(const Octet (&octets)[kN], const int32_t* a, int first,
                                              vi (&sum)[kTokensNow][kV], vi (&odd)[kTokensNow][kV]) {
  vi w[kN], w1[kN];
#pragma GCC unroll 4
  for (int i = 0; i < kN; i++) {
    w[i] = operand<kKind, kBits, kApart, kDword>(octets[i]);
    if constexpr (kBits == 8) w1[i] = operand<kKind, kBits, kApart, 1>(octets[i]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
    const vi av = splat_int(a[kDword * kTokensNow + t]);
#pragma GCC unroll 4
    for (int i = 0; i < kN; i++) {
      vi& acc = kApart && kDword % 2 == 1 ? odd[t][first + i] : sum[t][first + i];
      if constexpr (kBits == 16) acc = dot(acc, w[i], av);
      if constexpr (kBits == 8) acc = eight_products<kKind>(acc, w[i], av, w1[i], splat_int(a[kTokensNow + t]));
      if constexpr (kTokensNow > 2) keep(acc);
    }
  }
  if constexpr (kBits == 16 && kDword < 3) add_octets<kKind, kBits, kApart, kDword + 1>(octets, a, first, sum, odd);
}

// kTokensNow tokens, all there are, and up to kTilesNow tiles; where there are fewer, the last one is taken again.
template <Kind kKind, int kBits, int kTokensNow, int kTilesNow>
void int_gemv(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles, float* sums) {
  constexpr int kLines = kKind == Kind::kInt8 ? 2 : 1, kDwords = kBits / 4;  // of 8 columns
  constexpr int kV = kTilesNow * kVectors;
  constexpr bool kApart = kBits == 16 && 2 * kTokensNow <= kTokens;
  const int64_t n_groups = w.n_groups(), n_blocks = x.n_blocks(), n_lines = w.n_lines();
  const int64_t blocks_a_group = (w.group_size + x.block - 1) / x.block;
  const int64_t n_octets = (w.n_columns + 7) / 8, octets_a_block = (x.block + 7) / 8;
  const Scales scales{w.scales, w.wide_scales}, offsets{w.offsets, w.wide_scales};
  int64_t tiles[kTilesNow];  // behind the first one
#pragma GCC unroll 4
  for (int j = 0; j < kTilesNow; j++) tiles[j] = j < n_tiles ? j : n_tiles - 1;
  const uint32_t* line = w.lines + tile * n_lines * 16;
  const auto* a = reinterpret_cast<const int32_t*>(x.dwords);
  for (int i = 0; i < kTokensNow * kV; i++) store(sums + i * kLanes, vf{});  // [token][vector of rows]
  for (int64_t block = 0, group = 0, in_group = 0; block < n_blocks; block++) {
    const int64_t begin = block * octets_a_block;
    const int64_t end = begin + octets_a_block < n_octets ? begin + octets_a_block : n_octets;
    // At the end of these tiles, what comes next is the tiles behind the last one.
    const int64_t ahead = (end + kPrefetchOctets <= n_octets ? kPrefetchOctets * kLines
                                                             : kPrefetchOctets * kLines + (kTilesNow - 1) * n_lines) *
                          16;
    const auto place = [&](int i) { return ((tile + tiles[i / kVectors]) * n_groups + group) * 16 + i % kVectors * kLanes; };
    const int32_t* const neg8_sums = x.neg8_sums + block * kTokensNow;
    vi isum[kTokensNow][kV], odd[kTokensNow][kV];
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      vi points = {};
      if constexpr (kKind == Kind::kInt4z) points = zero_point_lanes(w.zero_points + place(i));
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        isum[t][i] = start_of_sum<kKind, kBits>(neg8_sums[t], points);
        odd[t][i] = vi{};
      }
    }
    for (int64_t octet = begin; octet < end; octet++, a += kDwords * kTokensNow, line += kLines * 16) {
      // A second line that is not there has only zeros for activations: the first one does as well.
      const int64_t next = kLines == 2 && (octet + 1) * 2 > n_lines ? 0 : 16;
#pragma GCC unroll 4
      for (int j = 0; j < kTilesNow; j++) {
#pragma GCC unroll 4
        for (int l = 0; l < kLines; l++) prefetch(line + tiles[j] * n_lines * 16 + ahead + l * 16);
      }
      // All vectors of rows meet an activation at a time, or, where there are few of these, a vector meets all of them.
      constexpr int kNow = kTokensNow == 1 ? 1 : kV;
#pragma GCC unroll 4
      for (int first = 0; first < kV; first += kNow) {
        Octet octets[kNow];
#pragma GCC unroll 4
        for (int i = 0; i < kNow; i++) {
          const uint32_t* const from = line + tiles[(first + i) / kVectors] * n_lines * 16;
          octets[i] = load_octet<kKind>(from + (first + i) % kVectors * kLanes, next);
        }
        add_octets<kKind, kBits, kApart>(octets, a, first, isum, odd);
      }
    }
    vf w_scales[kV], w_offsets[kV];
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      w_scales[i] = weight_scale<kKind>(scales, place(i));
      if constexpr (kKind == Kind::kInt4o) w_offsets[i] = offsets.lanes(place(i));
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokensNow; t++) {
      const vf a_scale = splat(x.scales[block * kTokensNow + t]);
#pragma GCC unroll 4
      for (int i = 0; i < kV; i++) {
        if constexpr (kApart) isum[t][i] += is_bytes(kKind) ? odd[t][i] : odd[t][i] >> 4;
        float* const sum = sums + (t * kV + i) * kLanes;
        vf next = load(sum) + __builtin_convertvector(isum[t][i], vf) * (w_scales[i] * a_scale);
        if constexpr (kKind == Kind::kInt4o) next += sum_of_activations(neg8_sums[t]) * (w_offsets[i] * a_scale);
        store(sum, next);
      }
    }
    if (++in_group == blocks_a_group) group++, in_group = 0;
  }
  for (int t = 0; t < kTokensNow; t++) {
    for (int64_t i = 0; i < n_tiles * kVectors; i++) {
      store(y + t * ldy + tile * kTileRows + i * kLanes, load(sums + (t * kV + i) * kLanes));
    }
  }
}

// Up to kTokensNow tokens, of kStreams tiles side by side for one token, of kTiles for more.
template <Kind kKind, int kBits, int kTokensNow>
void int_gemv_up_to(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                    float* sums) {
  if constexpr (kTokensNow > 1) {
    if (x.n_tokens < kTokensNow) return int_gemv_up_to<kKind, kBits, kTokensNow - 1>(w, x, y, ldy, tile, tile_end, sums);
  }
  constexpr int kNow = kTokensNow == 1 ? kStreams : kTiles;
  for (; tile < tile_end; tile += kNow) {
    int_gemv<kKind, kBits, kTokensNow, kNow>(w, x, y, ldy, tile, tile_end - tile < kNow ? tile_end - tile : kNow, sums);
  }
}

template <Kind kKind, int kBits>
void int_tiles(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
               void* scratch) {
  if (x.n_tokens <= kTokens) {
    return int_gemv_up_to<kKind, kBits, kTokens>(w, x, y, ldy, tile, tile_end, static_cast<float*>(scratch));
  }
  for_parts(tile, tile_end, x.n_tokens, [&](int64_t t, int64_t n_tiles, int64_t first, int64_t n_tokens) {
    int_gemm<kKind, kBits>(w, x, y, ldy, t, n_tiles, first, n_tokens, static_cast<uint32_t*>(scratch));
  });
}

void matmul_int(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                void* scratch) {
  const bool bytes = x.bits == 8;
  auto run = [&](auto tiles) { tiles(w, x, y, ldy, tile_begin, tile_end, scratch); };
  if (w.kind == Kind::kInt4) run(bytes ? int_tiles<Kind::kInt4, 8> : int_tiles<Kind::kInt4, 16>);
  if (w.kind == Kind::kInt4z) run(bytes ? int_tiles<Kind::kInt4z, 8> : int_tiles<Kind::kInt4z, 16>);
  if (w.kind == Kind::kInt4o) run(bytes ? int_tiles<Kind::kInt4o, 8> : int_tiles<Kind::kInt4o, 16>);
  if (w.kind == Kind::kE2m1) run(bytes ? int_tiles<Kind::kE2m1, 8> : int_tiles<Kind::kE2m1, 16>);
  if (w.kind == Kind::kInt8) run(bytes ? int_tiles<Kind::kInt8, 8> : int_tiles<Kind::kInt8, 16>);
}

// ---- floats ---------------------------------------------------------------------------------------------------------

// sums [token][tile][16]: the chains go on, or, with scales, sums += a block's chain * w_scale.
template <bool kScaled, int kTilesNow, int kTokensNow>
inline void float_inner(const float* w, const vf* w_scales, int64_t n_columns, const float* x, int64_t stride, float* sums) {
  constexpr int kV = kTilesNow * kVectors;
  vf acc[kTokensNow][kV];
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) acc[t][v] = kScaled ? vf{} : load(sums + (t * kV + v) * kLanes);
  }
  for (int64_t k = 0; k < n_columns; k++, x += stride, w += kV * kLanes) {
    vf wv[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) wv[v] = load(w + v * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < kTokensNow; t++) {
      const vf xv = splat(x[t]);
#pragma GCC unroll 4
      for (int v = 0; v < kV; v++) acc[t][v] = fma(wv[v], xv, acc[t][v]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) {
      float* sum = sums + (t * kV + v) * kLanes;
      store(sum, kScaled ? load(sum) + acc[t][v] * w_scales[v] : acc[t][v]);
    }
  }
}

template <bool kScaled, int kTilesNow, int kTokensNow>
inline void float_inner_up_to(int64_t n, const float* w, const vf* w_scales, int64_t n_columns, const float* x,
                              int64_t stride, float* sums) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) {
      return float_inner_up_to<kScaled, kTilesNow, kTokensNow - 1>(n, w, w_scales, n_columns, x, stride, sums);
    }
  }
  float_inner<kScaled, kTilesNow, kTokensNow>(w, w_scales, n_columns, x, stride, sums);
}

template <bool kScaled, int kTilesNow>
void float_group(const float* w, const vf* w_scales, int64_t n_columns, const float* x, int64_t stride, float* sums) {
  for (int64_t t = 0; t < stride; t += kTokens, sums += kTokens * kTilesNow * kTileRows) {
    const int64_t n = stride - t < kTokens ? stride - t : kTokens;
    float_inner_up_to<kScaled, kTilesNow, kTokens>(n, w, w_scales, n_columns, x + t, stride, sums);
  }
}

template <Kind kKind>
void float_gemm(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles,
                int64_t first, int64_t n_tokens, float* scratch) {
  constexpr bool kScaled = is_codebook(kKind);
  float* const sums = scratch + kGemmTiles * kTileRows * kBlock;  // [panel][token][tile][16]
  for (int64_t i = 0; i < n_tokens * n_tiles * kTileRows; i += kLanes) store(sums + i, vf{});
  const Scales scales{w.scales, w.wide_scales};
  const int64_t n_groups = w.n_groups(), block = kScaled ? w.block() : kBlock;
  const int64_t end = pad_to(w.n_columns, columns_per_dword(kKind));
  for (int64_t column = 0; column < end; column += block) {
    const int64_t n_columns = end - column < block ? end - column : block;
    vf w_scales[kGemmTiles * kVectors];
    for (int64_t i = 0; kScaled && i < n_tiles * kVectors; i++) {
      const int64_t at = (tile + i / kVectors) * n_groups + column / w.group_size;
      w_scales[i] = scales.lanes(at * 16 + i % kVectors * kLanes);
    }
    for (int64_t j = 0; j < n_tiles; j += kTiles) {
      float* const out = scratch + j * kTileRows * kBlock;
      n_tiles - j < kTiles ? unpack_float<kKind, 1>(w, tile + j, column, n_columns, out)
                           : unpack_float<kKind, kTiles>(w, tile + j, column, n_columns, out);
    }
    for (int64_t m = first; m < first + n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      const float* values = x.values + m * x.n_padded() + column * n;
      for (int64_t j = 0; j < n_tiles; j += kTiles) {
        const int64_t n_now = n_tiles - j < kTiles ? 1 : kTiles;
        const float* const weights = scratch + j * kTileRows * kBlock;
        float* const out = sums + (j * n_tokens + (m - first) * n_now) * kTileRows;
        n_now < kTiles ? float_group<kScaled, 1>(weights, w_scales + j * kVectors, n_columns, values, n, out)
                       : float_group<kScaled, kTiles>(weights, w_scales + j * kVectors, n_columns, values, n, out);
      }
    }
  }
  write_sums(sums, n_tokens, n_tiles, y + first * ldy + tile * kTileRows, ldy);
}

// One token, kTilesNow tiles at once: their chains hide the latency of the fused multiply-add.
template <Kind kKind, int kTilesNow>
void float_gemv(const Matrix& w, const FloatActivations& x, float* y, int64_t tile) {
  constexpr int kColumns = columns_per_dword(kKind);
  const int64_t n_lines = w.n_lines();
  const uint32_t* lines = w.lines + tile * n_lines * 16;
  vf acc[kTilesNow][kVectors] = {};
  for (int64_t i = 0; i < n_lines; i++) {
    const vf x0 = splat(x.values[i * kColumns]);
    const vf x1 = splat(x.values[i * kColumns + kColumns - 1]);
#pragma GCC unroll 4
    for (int j = 0; j < kTilesNow; j++) {
      const uint32_t* line = lines + (j * n_lines + i) * 16;
      prefetch(line + 2 * kPrefetchOctets * 16);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const vi lanes = load_bits(line + v * kLanes);
        acc[j][v] = fma(float_column<kKind, 0>(lanes), x0, acc[j][v]);
        if constexpr (kColumns == 2) acc[j][v] = fma(float_column<kKind, 1>(lanes), x1, acc[j][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) store(y + (tile + j) * kTileRows + v * kLanes, acc[j][v]);
  }
}

template <int kColumn, int kTilesNow>
inline void add_levels(const Levels& levels, const vi (&lines)[kTilesNow][kVectors], const float* x,
                       vf (&acc)[kTilesNow][kVectors]) {
  const vf xv = splat(x[kColumn]);
#pragma GCC unroll 4
  for (int j = 0; j < kTilesNow; j++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) acc[j][v] = fma(level_column<kColumn>(levels, lines[j][v]), xv, acc[j][v]);
  }
  if constexpr (kColumn < 7) add_levels<kColumn + 1>(levels, lines, x, acc);
}

template <Kind kKind, int kTilesNow>
void codebook_gemv(const Matrix& w, const FloatActivations& x, float* y, int64_t tile) {
  const Levels levels(levels_of(kKind));
  const Scales scales{w.scales, w.wide_scales};
  const int64_t n_lines = w.n_lines(), n_groups = w.n_groups(), lines_a_block = (w.block() + 7) / 8;
  const int64_t blocks_a_group = (w.group_size + w.block() - 1) / w.block();
  const uint32_t* line = w.lines + tile * n_lines * 16;
  vf sum[kTilesNow][kVectors] = {};
  for (int64_t begin = 0, block = 0; begin < n_lines; begin += lines_a_block, block++) {
    const int64_t end = begin + lines_a_block < n_lines ? begin + lines_a_block : n_lines;
    vf acc[kTilesNow][kVectors] = {};
    for (int64_t i = begin; i < end; i++, line += 16) {
      vi lanes[kTilesNow][kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kTilesNow; j++) {
        prefetch(line + (j * n_lines + kPrefetchOctets) * 16);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          lanes[j][v] = load_bits(line + j * n_lines * 16 + v * kLanes);
          keep(lanes[j][v]);
        }
      }
      add_levels<0>(levels, lanes, x.values + i * 8, acc);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTilesNow; j++) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        sum[j][v] += acc[j][v] * scales.lanes(((tile + j) * n_groups + block / blocks_a_group) * 16 + v * kLanes);
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kTilesNow; j++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(y + (tile + j) * kTileRows + v * kLanes, sum[j][v]);
  }
}

template <Kind kKind, int kTilesNow>
void any_float_gemv(const Matrix& w, const FloatActivations& x, float* y, int64_t tile) {
  if constexpr (is_codebook(kKind)) codebook_gemv<kKind, kTilesNow>(w, x, y, tile);
  if constexpr (is_float(kKind)) float_gemv<kKind, kTilesNow>(w, x, y, tile);
}

template <Kind kKind>
void float_tiles(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                 void* scratch) {
  if (x.n_tokens == 1) {
    for (; tile + 4 <= tile_end; tile += 4) any_float_gemv<kKind, 4>(w, x, y, tile);
    for (; tile < tile_end; tile++) any_float_gemv<kKind, 1>(w, x, y, tile);
    return;
  }
  for_parts(tile, tile_end, x.n_tokens, [&](int64_t t, int64_t n_tiles, int64_t first, int64_t n_tokens) {
    float_gemm<kKind>(w, x, y, ldy, t, n_tiles, first, n_tokens, static_cast<float*>(scratch));
  });
}

void matmul_float(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                  void* scratch) {
  auto run = [&](auto tiles) { tiles(w, x, y, ldy, tile_begin, tile_end, scratch); };
  if (w.kind == Kind::kNf4) run(float_tiles<Kind::kNf4>);
  if (w.kind == Kind::kFp4) run(float_tiles<Kind::kFp4>);
  if (w.kind == Kind::kF16) run(float_tiles<Kind::kF16>);
  if (w.kind == Kind::kBf16) run(float_tiles<Kind::kBf16>);
  if (w.kind == Kind::kF32) run(float_tiles<Kind::kF32>);
}
