// GEMM: a block of kGemmTiles tiles is unpacked into the cache, and all tokens run over it, as many at a time as the
// registers hold sums. The sums live in scratch memory and go to the output at the end.

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

// An output larger than this is written around the caches, where it would not stay: an ordinary store reads each line
// first.
constexpr int64_t kStreamedNbytes = int64_t{1} << 20;

// sums [panel][token][tile][16] -> rows of y. A panel is kTiles tiles; the last one may have fewer, and then has one.
template <bool kStreamed>
void write_sums_as(const float* sums, int64_t n_tokens, int64_t n_tiles, float* y, int64_t ldy) {
  for (int64_t j = 0; j < n_tiles; j += kTiles) {
    const int64_t width = (n_tiles - j < kTiles ? 1 : kTiles) * kTileRows;
    for (int64_t m = 0; m < n_tokens; m++) {
      for (int64_t i = 0; i < width; i += kLanes) {
        float* const to = y + m * ldy + j * kTileRows + i;
        kStreamed ? stream(to, load(sums + i)) : store(to, load(sums + i));
      }
      sums += width;
    }
  }
  if constexpr (kStreamed) end_of_stream();
}
inline void write_sums(const float* sums, int64_t n_tokens, int64_t n_tiles, float* y, int64_t ldy) {
  const bool aligned = reinterpret_cast<uintptr_t>(y) % 64 == 0 && ldy % 16 == 0;
  aligned && n_tokens * ldy * 4 > kStreamedNbytes ? write_sums_as<true>(sums, n_tokens, n_tiles, y, ldy)
                                                  : write_sums_as<false>(sums, n_tokens, n_tiles, y, ldy);
}

// The lines that come after a block of columns: those of the next block or, behind the last one, of the next tiles' first. A
// few are fetched before each group of tokens; all at once, while others are unpacked, they would hold that up.
struct NextLines {
  const uint32_t* first;
  int64_t tile_stride, n_tiles, n_lines;  // n_lines: of a tile, for a group of tokens

  NextLines(const Matrix& w, int64_t tile, int64_t tile_count, int64_t next_column, int64_t n_columns, int64_t n_tokens)
      : tile_stride(w.n_lines() * 16), n_tiles(tile_count) {
    const bool is_last = next_column >= w.n_columns;
    const int64_t line = is_last ? 0 : n_lines_of(w.kind, next_column);
    first = w.lines + (is_last ? tile + n_tiles : tile) * tile_stride + line * 16;
    const int64_t n_groups = (n_tokens + kTokenGroup - 1) / kTokenGroup;
    n_lines = (n_lines_of(w.kind, n_columns) + n_groups - 1) / n_groups;
  }
  void fetch(int64_t group) const {
    for (int64_t j = 0; j < n_tiles; j++) {
      for (int64_t i = group * n_lines; i < (group + 1) * n_lines; i++) prefetch(first + j * tile_stride + i * 16);
    }
  }
};

// ---- unpacking ------------------------------------------------------------------------------------------------------

// Columns [column, column + n_columns) of kTilesNow tiles -> out [dword of activations][tile][16]: int16 pairs less their
// offset, or bytes with it.
template <Codes kStored, int kBits, int kTilesNow>
void unpack_int(const Matrix& w, const Table<of_whole_lines(kStored)>& table, int64_t tile, int64_t column,
                int64_t n_columns, const vi* zero_points, uint32_t* out) {
  constexpr Codes kCodes = of_whole_lines(kStored);
  constexpr int kDwords = kBits / 4;  // of 8 columns
  const int64_t n_lines = w.n_lines(), first = column / 8, end = first + pad_to(n_columns, 8) / 8;
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) {
      const uint32_t* const lines = w.lines + (tile + j) * n_lines * 16 + v * kLanes;
      const uint32_t* const last = lines + (n_lines - 1) * 16;
      const vi zero_point = (zero_points[j * kVectors + v] & 0xFFFF) * 0x10001;
      uint32_t* to = out + j * 16 + v * kLanes;
      for (int64_t i = first; i < end; i++, to += kDwords * kTilesNow * 16) {
        const uint32_t* const line = lines + line_of<kStored>(i) * 16;
        auto put = [&](int dword, vi x) { store_bits(to + dword * kTilesNow * 16, x); };
        auto less = [&](vi pair) { return kCodes == Codes::kBytes ? pair : (vi)((vs)pair - (vs)zero_point); };
        vi x = load_line<kStored>(line, i);
        if constexpr (kCodes == Codes::kWordLevels) {
          put(0, less(table.template operand<0>(x))), put(1, less(table.template operand<1>(x)));
          put(2, less(table.template operand<2>(x))), put(3, less(table.template operand<3>(x)));
        } else if constexpr (are_signed_bytes(kCodes)) {
          vi y = {};
          if constexpr (kCodes == Codes::kByteLevels) {
            y = table.of(nibble_bytes<1>(x)), x = table.of(nibble_bytes<0>(x));
          } else if (line < last) {
            y = load_bits(line + 16);
          }
          if constexpr (kBits == 16) {
            put(0, less(byte_pair<0>(x))), put(1, less(byte_pair<0>(y)));
            put(2, less(byte_pair<1>(x))), put(3, less(byte_pair<1>(y)));
          } else {
            const vi bias = splat_int(biased(kCodes) ? static_cast<int32_t>(0x80808080u) : 0);
            put(0, x ^ bias), put(1, y ^ bias);
          }
        } else if constexpr (kBits == 16) {
          put(0, (vi)((vs)nibble_pair<0>(x) - (vs)zero_point)), put(1, (vi)((vs)nibble_pair<1>(x) - (vs)zero_point));
          put(2, (vi)((vs)nibble_pair<2>(x) - (vs)zero_point)), put(3, (vi)((vs)nibble_pair<3>(x) - (vs)zero_point));
        } else {
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
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) {
      const uint32_t* line = w.lines + ((tile + j) * w.n_lines() + column / kColumns) * 16 + v * kLanes;
      float* to = out + j * 16 + v * kLanes;
      for (int64_t k = 0; k < n_columns; k += kColumns, line += 16) {
        auto put = [&](int c, vf x) { store(to + (k + c) * kTilesNow * 16, x); };
        const vi x = load_bits(line);
        put(0, float_column<kKind, 0>(x));
        if constexpr (kColumns == 2) put(1, float_column<kKind, 1>(x));
      }
    }
  }
}

// ---- integers -------------------------------------------------------------------------------------------------------

struct IntBlock {
  const uint32_t* weights;  // unpacked
  const vf* w_scales;
  const vi* zero_points;
  int64_t n_blocks8;
  const uint32_t* dwords;  // of the first token
  const float* a_scales;
  const int32_t* neg8_sums;
  int64_t stride;  // tokens in the group
};

// sums [token][tile][16] += a block's products. Inlined: as a function of its own it ran at 0.93 of the speed.
template <Codes kCodes, int kBits, int kTilesNow, int kTokensNow>
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
      if constexpr (kBits == 8) acc[t][v] = start_of_sum<kCodes, kBits>(b.neg8_sums[t], b.zero_points[v]);
    }
  }
  const uint32_t* a = b.dwords;
  const uint32_t* w = b.weights;
  if constexpr (kBits == 16) {
    for (int64_t block8 = 0; block8 < b.n_blocks8; block8++, a += 4 * b.stride) {
#pragma GCC unroll 1  // unrolled, it ran at 0.87 of the speed on AVX2
      for (int d = 0; d < 4; d++, w += kV * kLanes) {
        vi wv[kV];
#pragma GCC unroll 4
        for (int v = 0; v < kV; v++) wv[v] = load_bits(w + v * kLanes);
#pragma GCC unroll 16
        for (int t = 0; t < kTokensNow; t++) {
          const vi av = splat_int(static_cast<int32_t>(a[4 * t + d]));
#pragma GCC unroll 4
          for (int v = 0; v < kV; v++) acc[t][v] = dot(acc[t][v], wv[v], av);
        }
      }
    }
  } else {
    for (int64_t block8 = 0; block8 < b.n_blocks8; block8++, a += 2 * b.stride, w += 2 * kV * kLanes) {
      vi w0[kV], w1[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; v++) w0[v] = load_bits(w + v * kLanes), w1[v] = load_bits(w + (kV + v) * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < kTokensNow; t++) {
        const vi a0 = splat_int(static_cast<int32_t>(a[2 * t])), a1 = splat_int(static_cast<int32_t>(a[2 * t + 1]));
#pragma GCC unroll 4
        for (int v = 0; v < kV; v++) acc[t][v] = eight_products<kCodes>(acc[t][v], w0[v], a0, w1[v], a1);
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

template <Codes kCodes, int kBits, int kTilesNow, int kTokensNow>
[[gnu::always_inline]] inline void int_inner_up_to(int64_t n, const IntBlock& b, float* sums) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) return int_inner_up_to<kCodes, kBits, kTilesNow, kTokensNow - 1>(n, b, sums);
  }
  int_inner<kCodes, kBits, kTilesNow, kTokensNow>(b, sums);
}

// All tokens of a group of up to kTokenGroup.
template <Codes kCodes, int kBits, int kTilesNow>
void int_group(IntBlock b, float* sums) {
  constexpr int kNow = kBits == 8 ? kByteTokens : kTokens;
  // For activations of 16 bits weights come less their zero point, so that one kernel serves all codes.
  constexpr Codes kAs = kBits == 8 ? of_whole_lines(kCodes) : Codes::kBytes;
  for (int64_t t = 0; t < b.stride; t += kNow) {
    int_inner_up_to<kAs, kBits, kTilesNow, kNow>(b.stride - t < kNow ? b.stride - t : kNow, b, sums);
    b.dwords += kNow * kBits / 4, b.a_scales += kNow, b.neg8_sums += kNow, sums += kNow * kTilesNow * kTileRows;
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
template <Codes kCodes, int kBits>
void int_gemm(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles, int64_t first,
              int64_t n_tokens, uint32_t* scratch) {
  auto* const sums = reinterpret_cast<float*>(scratch + kGemmTiles * kTileRows * kBlock);  // [panel][token][tile][16]
  for (int64_t i = 0; i < n_tokens * n_tiles * kTileRows; i += kLanes) store(sums + i, vf{});
  const IntWeights weights(w);
  const Table<of_whole_lines(kCodes)> table(weights.codebook);
  const int64_t n_blocks = x.n_blocks(), n_dwords = x.n_dwords();
  for (int64_t block = 0; block < n_blocks; block++) {
    const int64_t column = block * x.block;
    const int64_t n_columns = column + x.block < w.n_columns ? x.block : w.n_columns - column;
    vf w_scales[kGemmTiles * kVectors], w_offsets[kGemmTiles * kVectors];
    vi zero_points[kGemmTiles * kVectors];
    for (int64_t j = 0; j < n_tiles; j++) {
      const int64_t group = column / w.group_size;
      for (int v = 0; v < kVectors; v++) {
        w_scales[j * kVectors + v] = weights.scales.lanes(tile + j, group, v);
        zero_points[j * kVectors + v] = weights.zero_point_at(tile + j, group, v);
        if (weights.has_offsets) w_offsets[j * kVectors + v] = weights.offsets.lanes(tile + j, group, v);
      }
    }
    for (int64_t j = 0; j < n_tiles; j += kTiles) {
      uint32_t* const out = scratch + j * kTileRows * kBlock;
      n_tiles - j < kTiles
          ? unpack_int<kCodes, kBits, 1>(w, table, tile + j, column, n_columns, zero_points + j * kVectors, out)
          : unpack_int<kCodes, kBits, kTiles>(w, table, tile + j, column, n_columns, zero_points + j * kVectors, out);
    }
    const NextLines next(w, tile, n_tiles, column + n_columns, n_columns, n_tokens);
    for (int64_t m = first; m < first + n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      next.fetch((m - first) / kTokenGroup);
      for (int64_t j = 0; j < n_tiles; j += kTiles) {
        const int64_t n_now = n_tiles - j < kTiles ? 1 : kTiles;
        float* const out = sums + (j * n_tokens + (m - first) * n_now) * kTileRows;
        const IntBlock b = {scratch + j * kTileRows * kBlock,
                            w_scales + j * kVectors,
                            zero_points + j * kVectors,
                            pad_to(n_columns, 8) / 8,
                            x.dwords + m * n_dwords + column * kBits / 32 * n,
                            x.scales + m * n_blocks + block * n,
                            x.neg8_sums + m * n_blocks + block * n,
                            n};
        n_now < kTiles ? int_group<kCodes, kBits, 1>(b, out) : int_group<kCodes, kBits, kTiles>(b, out);
        if (weights.has_offsets) {
          n_now < kTiles ? add_offsets<1>(b, w_offsets + j * kVectors, out)
                         : add_offsets<kTiles>(b, w_offsets + j * kVectors, out);
        }
      }
    }
  }
  write_sums(sums, n_tokens, n_tiles, y + first * ldy + tile * kTileRows, ldy);
}

// ---- floats ---------------------------------------------------------------------------------------------------------

// sums [token][tile][16]: the chains go on.
template <int kTilesNow, int kTokensNow>
inline void float_inner(const float* w, int64_t n_columns, const float* x, int64_t stride, float* sums) {
  constexpr int kV = kTilesNow * kVectors;
  vf acc[kTokensNow][kV];
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) acc[t][v] = load(sums + (t * kV + v) * kLanes);
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
    for (int v = 0; v < kV; v++) store(sums + (t * kV + v) * kLanes, acc[t][v]);
  }
}

template <int kTilesNow, int kTokensNow>
inline void float_inner_up_to(int64_t n, const float* w, int64_t n_columns, const float* x, int64_t stride, float* sums) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) {
      return float_inner_up_to<kTilesNow, kTokensNow - 1>(n, w, n_columns, x, stride, sums);
    }
  }
  float_inner<kTilesNow, kTokensNow>(w, n_columns, x, stride, sums);
}

template <int kTilesNow>
void float_group(const float* w, int64_t n_columns, const float* x, int64_t stride, float* sums) {
  for (int64_t t = 0; t < stride; t += kTokens, sums += kTokens * kTilesNow * kTileRows) {
    const int64_t n = stride - t < kTokens ? stride - t : kTokens;
    float_inner_up_to<kTilesNow, kTokens>(n, w, n_columns, x + t, stride, sums);
  }
}

template <Kind kKind>
void float_gemm(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, int64_t n_tiles,
                int64_t first, int64_t n_tokens, float* scratch) {
  float* const sums = scratch + kGemmTiles * kTileRows * kBlock;  // [panel][token][tile][16]
  for (int64_t i = 0; i < n_tokens * n_tiles * kTileRows; i += kLanes) store(sums + i, vf{});
  const int64_t end = pad_to(w.n_columns, columns_per_dword(kKind));
  for (int64_t column = 0; column < end; column += kBlock) {
    const int64_t n_columns = end - column < kBlock ? end - column : kBlock;
    for (int64_t j = 0; j < n_tiles; j += kTiles) {
      float* const out = scratch + j * kTileRows * kBlock;
      n_tiles - j < kTiles ? unpack_float<kKind, 1>(w, tile + j, column, n_columns, out)
                           : unpack_float<kKind, kTiles>(w, tile + j, column, n_columns, out);
    }
    const NextLines next(w, tile, n_tiles, column + n_columns, n_columns, n_tokens);
    for (int64_t m = first; m < first + n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      next.fetch((m - first) / kTokenGroup);
      const float* values = x.values + m * x.n_padded() + column * n;
      for (int64_t j = 0; j < n_tiles; j += kTiles) {
        const int64_t n_now = n_tiles - j < kTiles ? 1 : kTiles;
        const float* const weights = scratch + j * kTileRows * kBlock;
        float* const out = sums + (j * n_tokens + (m - first) * n_now) * kTileRows;
        n_now < kTiles ? float_group<1>(weights, n_columns, values, n, out)
                       : float_group<kTiles>(weights, n_columns, values, n, out);
      }
    }
  }
  write_sums(sums, n_tokens, n_tiles, y + first * ldy + tile * kTileRows, ldy);
}
