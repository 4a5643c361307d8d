// GEMV of 2 up to kTokens tokens, as integers: lines are unpacked in registers and meet all tokens there.

// An 8-column block of one vector of rows, as it is stored: x, and of kinds of whole bytes y. Of levels that are bytes,
// those that it stands for.
struct Block8 {
  vi x, y;
};
template <Codes kStored, Codes kCodes = of_whole_lines(kStored)>
inline Block8 load_block8(const uint32_t* line, int64_t block8, int64_t next, const Table<kCodes>& table) {
  Block8 o = {load_line<kStored>(line, block8), vi{}};
  keep(o.x);
  if constexpr (kCodes == Codes::kBytes) {
    o.y = load_bits(line + next);
    keep(o.y);
  }
  if constexpr (kCodes == Codes::kByteLevels) o = {table.of(nibble_bytes<0>(o.x)), table.of(nibble_bytes<1>(o.x))};
  return o;
}
// Their operand for dword kDword of the activations. kApart: of codes of 4 bits, those of odd dwords stay where they are in
// their bytes, 16 times as large as they should be, which saves shifts.
template <Codes kCodes, int kBits, bool kApart, int kDword>
inline vi operand(const Block8& o, const Table<kCodes>& table) {
  if constexpr (kCodes == Codes::kWordLevels) {
    return table.template operand<kDword>(o.x);
  } else if constexpr (are_signed_bytes(kCodes)) {
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
// Their products with the activations a [token][dword], from kDword on. kApart: `odd` is the sum of the odd dwords'. (Kept,
// or GCC adds several products to one another before it adds them to the sum, for which there are too few registers.)
template <Codes kCodes, int kBits, bool kApart, int kDword = 0, int kTokensNow, int kV>
[[gnu::always_inline]] inline void add_blocks8(const Block8 (&blocks8)[kV], const Table<kCodes>& table, const int32_t* a,
                                               vi (&sum)[kTokensNow][kV], vi (&odd)[kTokensNow][kV]) {
  vi w[kV], w1[kV];
#pragma GCC unroll 4
  for (int i = 0; i < kV; i++) {
    w[i] = operand<kCodes, kBits, kApart, kDword>(blocks8[i], table);
    if constexpr (kBits == 8) w1[i] = operand<kCodes, kBits, kApart, 1>(blocks8[i], table);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
    const vi av = splat_int(a[kBits / 4 * t + kDword]);
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      vi& acc = kApart && kDword % 2 == 1 ? odd[t][i] : sum[t][i];
      if constexpr (kBits == 16) acc = dot(acc, w[i], av);
      if constexpr (kBits == 8) acc = eight_products<kCodes>(acc, w[i], av, w1[i], splat_int(a[2 * t + 1]));
      if constexpr (kTokensNow > 2) keep(acc);
    }
  }
  if constexpr (kBits == 16 && kDword < 3) add_blocks8<kCodes, kBits, kApart, kDword + 1>(blocks8, table, a, sum, odd);
}

// kTokensNow tokens, all there are, and up to kTiles tiles; where there are fewer, the last one is taken again.
template <Codes kStored, int kBits, int kTokensNow>
void int_gemv(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles, float* sums) {
  constexpr Codes kCodes = of_whole_lines(kStored);
  constexpr int kLines = kCodes == Codes::kBytes ? 2 : 1, kDwords = kBits / 4;  // of 8 columns, at most
  constexpr int kV = kTiles * kVectors;
  constexpr bool kApart = kCodes != Codes::kWordLevels && kBits == 16 && 2 * kTokensNow <= kTokens;
  const int64_t n_blocks = x.n_blocks(), n_lines = w.n_lines();
  const int64_t blocks_a_group = (w.group_size + x.block - 1) / x.block;
  const int64_t n_blocks8 = (w.n_columns + 7) / 8, blocks8_a_block = (x.block + 7) / 8;
  const IntWeights weights(w);
  const Table<kCodes> table(weights.codebook);
  int64_t tiles[kTiles];  // behind the first one
#pragma GCC unroll 4
  for (int j = 0; j < kTiles; j++) tiles[j] = j < n_tiles ? j : n_tiles - 1;
  const uint32_t* const lines = w.lines + tile * n_lines * 16;
  const auto* a = reinterpret_cast<const int32_t*>(x.dwords);
  for (int i = 0; i < kTokensNow * kV; i++) store(sums + i * kLanes, vf{});  // [token][vector of rows]
  for (int64_t block = 0, group = 0, in_group = 0; block < n_blocks; block++) {
    const int64_t begin = block * blocks8_a_block;
    const int64_t end = begin + blocks8_a_block < n_blocks8 ? begin + blocks8_a_block : n_blocks8;
    // At the end of these tiles, what comes next is the tiles behind the last one.
    const int64_t ahead = (end + kPrefetchBlocks8 <= n_blocks8 ? kPrefetchBlocks8 * kLines
                                                               : kPrefetchBlocks8 * kLines + (kTiles - 1) * n_lines) *
                          16;
    const int32_t* const neg8_sums = x.neg8_sums + block * kTokensNow;
    vi isum[kTokensNow][kV], odd[kTokensNow][kV];
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      vi zero_points = {};
      if constexpr (kCodes != Codes::kBytes) {
        zero_points = weights.zero_point_at(tile + tiles[i / kVectors], group, i % kVectors);
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        isum[t][i] = start_of_sum<kCodes, kBits>(neg8_sums[t], zero_points);
        odd[t][i] = vi{};
      }
    }
    for (int64_t block8 = begin; block8 < end; block8++, a += kDwords * kTokensNow) {
      const uint32_t* const line = lines + line_of<kStored>(block8) * 16;
      // A second line that is not there has only zeros for activations: the first one does as well.
      const int64_t next = kLines == 2 && (block8 + 1) * 2 > n_lines ? 0 : 16;
#pragma GCC unroll 4
      for (int j = 0; j < kTiles; j++) {
#pragma GCC unroll 4
        for (int l = 0; l < kLines; l++) prefetch(line + tiles[j] * n_lines * 16 + ahead + l * 16);
      }
      Block8 blocks8[kV];
#pragma GCC unroll 4
      for (int i = 0; i < kV; i++) {
        const uint32_t* const from = line + tiles[i / kVectors] * n_lines * 16;
        blocks8[i] = load_block8<kStored>(from + i % kVectors * kLanes, block8, next, table);
      }
      add_blocks8<kCodes, kBits, kApart>(blocks8, table, a, isum, odd);
    }
    vf w_scales[kV], w_offsets[kV];
#pragma GCC unroll 4
    for (int i = 0; i < kV; i++) {
      w_scales[i] = weights.scales.lanes(tile + tiles[i / kVectors], group, i % kVectors);
      if (weights.has_offsets) w_offsets[i] = weights.offsets.lanes(tile + tiles[i / kVectors], group, i % kVectors);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokensNow; t++) {
      const vf a_scale = splat(x.scales[block * kTokensNow + t]);
#pragma GCC unroll 4
      for (int i = 0; i < kV; i++) {
        if constexpr (kApart) isum[t][i] += are_signed_bytes(kCodes) ? odd[t][i] : odd[t][i] >> 4;
        float* const sum = sums + (t * kV + i) * kLanes;
        vf next = load(sum) + __builtin_convertvector(isum[t][i], vf) * (w_scales[i] * a_scale);
        if (weights.has_offsets) next += sum_of_activations(neg8_sums[t]) * (w_offsets[i] * a_scale);
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

// 2 up to kTokensNow tokens.
template <Codes kCodes, int kBits, int kTokensNow>
void int_gemv_up_to(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                    float* sums) {
  if constexpr (kTokensNow > 2) {
    if (x.n_tokens < kTokensNow) return int_gemv_up_to<kCodes, kBits, kTokensNow - 1>(w, x, y, ldy, tile, tile_end, sums);
  }
  for (; tile < tile_end; tile += kTiles) {
    int_gemv<kCodes, kBits, kTokensNow>(w, x, y, ldy, tile, tile_end - tile < kTiles ? tile_end - tile : kTiles, sums);
  }
}
