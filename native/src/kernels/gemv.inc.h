// GEMV: lines are unpacked in registers, of several tiles side by side, as so many streams keep more of memory busy than
// one. Integers for up to kTokens tokens, floats for one.

// ---- integers -------------------------------------------------------------------------------------------------------

// An 8-column block of one vector of rows, as it is stored: x, and of kinds of whole bytes y. Of those of 4 bits that are
// looked up, the bytes that they stand for.
struct Block8 {
  vi x, y;
};
template <Codes kCodes>
inline Block8 load_block8(const uint32_t* line, int64_t next, const int8_t* codebook) {
  Block8 o = {load_bits(line), vi{}};
  keep(o.x);
  if constexpr (kCodes == Codes::kBytes) {
    o.y = load_bits(line + next);
    keep(o.y);
  }
  if constexpr (kCodes == Codes::kLookedUp) {
    o = {looked_up(codebook, nibble_bytes<0>(o.x)), looked_up(codebook, nibble_bytes<1>(o.x))};
  }
  return o;
}
// Their operand for dword kDword of the activations. kApart: of codes of 4 bits, those of odd dwords stay where they are in
// their bytes, 16 times as large as they should be, which saves shifts.
template <Codes kCodes, int kBits, bool kApart, int kDword>
inline vi operand(const Block8& o) {
  if constexpr (are_signed_bytes(kCodes)) {
    const vi half = kDword % 2 == 0 ? o.x : o.y;
    if constexpr (kBits == 16) return byte_pair<kDword / 2>(half);
    return half ^ splat_int(biased(kCodes) ? static_cast<int32_t>(0x80808080u) : 0);
  } else if constexpr (kBits == 8) {
    return nibble_bytes<kDword>(o.x);
  } else if constexpr (kApart) {
    return (vi)((vu)o.x >> kDword / 2 * 8) & (kDword % 2 == 0 ? 0x000F000F : 0x00F000F0);
  } else {
    return nibble_pair<kDword>(o.x);
  }
}
// Their products with the activations a [token][dword], from kDword on, for vectors of rows from `first` on. kApart: `odd`
// is the sum of the odd dwords'. (Kept, or GCC adds several products to one another before it adds them to the sum, for
// which there are too few registers.)
template <Codes kCodes, int kBits, bool kApart, int kDword = 0, int kN, int kTokensNow, int kV>
[[gnu::always_inline]] inline void add_blocks8(const Block8 (&blocks8)[kN], const int32_t* a, int first,
                                               vi (&sum)[kTokensNow][kV], vi (&odd)[kTokensNow][kV]) {
  vi w[kN], w1[kN];
#pragma GCC unroll 4
  for (int i = 0; i < kN; i++) {
    w[i] = operand<kCodes, kBits, kApart, kDword>(blocks8[i]);
    if constexpr (kBits == 8) w1[i] = operand<kCodes, kBits, kApart, 1>(blocks8[i]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
    const vi av = splat_int(a[kBits / 4 * t + kDword]);
#pragma GCC unroll 4
    for (int i = 0; i < kN; i++) {
      vi& acc = kApart && kDword % 2 == 1 ? odd[t][first + i] : sum[t][first + i];
      if constexpr (kBits == 16) acc = dot(acc, w[i], av);
      if constexpr (kBits == 8) acc = eight_products<kCodes>(acc, w[i], av, w1[i], splat_int(a[2 * t + 1]));
      if constexpr (kTokensNow > 2) keep(acc);
    }
  }
  if constexpr (kBits == 16 && kDword < 3) add_blocks8<kCodes, kBits, kApart, kDword + 1>(blocks8, a, first, sum, odd);
}

// The same for one vector and one token, with the low and the high bytes of activations apart (weights.inc.h): sums of
// products with the low bytes, and with the high ones. The unsigned side is the bytes there and the weights here, signed
// ones as w + 128.
template <Codes kCodes>
[[gnu::always_inline]] inline void add_low_high(const Block8& o, const int32_t* a, vi& low, vi& high) {
  const vi w0 = operand<kCodes, 8, false, 0>(o), w1 = operand<kCodes, 8, false, 1>(o);
  const vi flip = splat_int(biased(kCodes) ? static_cast<int32_t>(0x80808080u) : 0);
  low = dot_bytes(low, splat_int(a[0]), w0 ^ flip, splat_int(a[2]), w1 ^ flip);
  high = dot_bytes(high, w0, splat_int(a[1]), w1, splat_int(a[3]));
}

// kTokensNow tokens, all there are, and up to kTilesNow tiles; where there are fewer, the last one is taken again.
// kPlain: is_plain(w) holds, so that what a block does besides its products is known here.
template <Codes kCodes, int kBits, int kTokensNow, int kTilesNow, bool kPlain = false>
void int_gemv(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles, float* sums) {
  constexpr int kLines = kCodes == Codes::kBytes ? 2 : 1, kDwords = kBits / 4;  // of 8 columns
  constexpr int kV = kTilesNow * kVectors;
  constexpr bool kApart = kBits == 16 && 2 * kTokensNow <= kTokens;
  constexpr bool kLowHigh = in_low_high(kBits, kTokensNow);
  const int64_t n_blocks = x.n_blocks(), n_lines = w.n_lines();
  const int64_t blocks_a_group = (w.group_size + x.block - 1) / x.block;
  const int64_t n_blocks8 = (w.n_columns + 7) / 8, blocks8_a_block = (x.block + 7) / 8;
  const IntWeights weights(w);
  const bool has_offsets = !kPlain && weights.has_offsets;
  int64_t tiles[kTilesNow];  // behind the first one
#pragma GCC unroll 4
  for (int j = 0; j < kTilesNow; j++) tiles[j] = j < n_tiles ? j : n_tiles - 1;
  const uint32_t* line = w.lines + tile * n_lines * 16;
  const auto* a = reinterpret_cast<const int32_t*>(x.dwords);
  for (int i = 0; i < kTokensNow * kV; i++) store(sums + i * kLanes, vf{});  // [token][vector of rows]
  for (int64_t block = 0, group = 0, in_group = 0; block < n_blocks; block++) {
    const int64_t begin = block * blocks8_a_block;
    const int64_t end = begin + blocks8_a_block < n_blocks8 ? begin + blocks8_a_block : n_blocks8;
    // At the end of these tiles, what comes next is the tiles behind the last one.
    const int64_t ahead = (end + kPrefetchBlocks8 <= n_blocks8 ? kPrefetchBlocks8 * kLines
                                                               : kPrefetchBlocks8 * kLines + (kTilesNow - 1) * n_lines) *
                          16;
    const int32_t* const neg8_sums = x.neg8_sums + block * kTokensNow;
    vi isum[kTokensNow][kV], odd[kTokensNow][kV];  // or of low bytes, of high bytes
    vi bias = {};                                  // 128 times the sum of the high bytes
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      vi zero_points = {};
      if constexpr (kCodes != Codes::kBytes) {
        zero_points = kPlain ? splat_int(8) : weights.zero_point_at(tile + tiles[i / kVectors], group, i % kVectors);
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        isum[t][i] = start_of_sum<kCodes, kBits>(neg8_sums[t], zero_points);
        odd[t][i] = vi{};
      }
    }
    for (int64_t block8 = begin; block8 < end; block8++, a += kDwords * kTokensNow, line += kLines * 16) {
      // A second line that is not there has only zeros for activations: the first one does as well.
      const int64_t next = kLines == 2 && (block8 + 1) * 2 > n_lines ? 0 : 16;
#pragma GCC unroll 4
      for (int j = 0; j < kTilesNow; j++) {
#pragma GCC unroll 4
        for (int l = 0; l < kLines; l++) prefetch(line + tiles[j] * n_lines * 16 + ahead + l * 16);
      }
      // All vectors of rows meet an activation at a time, or, where there are few of these, a vector meets all of them.
      constexpr int kNow = kTokensNow == 1 ? 1 : kV;
#pragma GCC unroll 4
      for (int first = 0; first < kV; first += kNow) {
        Block8 blocks8[kNow];
#pragma GCC unroll 4
        for (int i = 0; i < kNow; i++) {
          const uint32_t* const from = line + tiles[(first + i) / kVectors] * n_lines * 16;
          blocks8[i] = load_block8<kCodes>(from + (first + i) % kVectors * kLanes, next, weights.codebook);
        }
        if constexpr (kLowHigh) {
          add_low_high<kCodes>(blocks8[0], a, isum[0][first], odd[0][first]);
        } else {
          add_blocks8<kCodes, kBits, kApart>(blocks8, a, first, isum, odd);
        }
      }
      if constexpr (kLowHigh && biased(kCodes)) {
        const vi all = splat_int(static_cast<int32_t>(0x80808080u));
        bias = dot_bytes(bias, all, splat_int(a[1]), all, splat_int(a[3]));
      }
    }
    vf w_scales[kV], w_offsets[kV];
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      w_scales[i] = kPlain ? weights.scales.f16_at(tile + tiles[i / kVectors], group, i % kVectors)
                           : weights.scale(tile + tiles[i / kVectors], group, i % kVectors);
      if (has_offsets) w_offsets[i] = weights.offsets.lanes(tile + tiles[i / kVectors], group, i % kVectors);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokensNow; t++) {
      const vf a_scale = splat(x.scales[block * kTokensNow + t]);
#pragma GCC unroll 4
      for (int i = 0; i < kV; i++) {
        if constexpr (kLowHigh) {
          isum[t][i] += (odd[t][i] - bias) << 8;
        } else if constexpr (kApart) {
          isum[t][i] += are_signed_bytes(kCodes) ? odd[t][i] : odd[t][i] >> 4;
        }
        float* const sum = sums + (t * kV + i) * kLanes;
        vf next = load(sum) + __builtin_convertvector(isum[t][i], vf) * (w_scales[i] * a_scale);
        if (has_offsets) next += sum_of_activations(neg8_sums[t]) * (w_offsets[i] * a_scale);
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
template <Codes kCodes, int kBits, int kTokensNow>
void int_gemv_up_to(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                    float* sums) {
  if constexpr (kTokensNow > 1) {
    if (x.n_tokens < kTokensNow) return int_gemv_up_to<kCodes, kBits, kTokensNow - 1>(w, x, y, ldy, tile, tile_end, sums);
  }
  constexpr int kNow = kTokensNow == 1 ? kStreams : kTiles;
  auto gemv = int_gemv<kCodes, kBits, kTokensNow, kNow>;
  if constexpr (kTokensNow == 1 && kCodes != Codes::kLookedUp) {  // decoding: the time between blocks shows
    if (is_plain(w)) gemv = int_gemv<kCodes, kBits, kTokensNow, kNow, true>;
  }
  for (; tile < tile_end; tile += kNow) {
    gemv(w, x, y, ldy, tile, tile_end - tile < kNow ? tile_end - tile : kNow, sums);
  }
}

// ---- floats ---------------------------------------------------------------------------------------------------------

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
      prefetch(line + 2 * kPrefetchBlocks8 * 16);
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
  const Scales scales = Scales::of(w);
  const int64_t n_lines = w.n_lines(), lines_a_block = (w.block() + 7) / 8;
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
        prefetch(line + (j * n_lines + kPrefetchBlocks8) * 16);
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
        sum[j][v] += acc[j][v] * scales.lanes(tile + j, block / blocks_a_group, v);
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
