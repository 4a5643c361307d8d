// Products of a tiled weight matrix with prepared activations. A lane is a row, so sums never cross lanes.
//
// Integer form (docs/numerics.md 2): y += float(isum) * (w_scale * a_scale), blocks of columns ascending.
// Float form: one chain of fused multiply-adds a row, columns ascending.
// GEMV (one token) unpacks in registers; GEMM unpacks one block of kTiles tiles into L1 and runs all tokens over it.

constexpr int kPrefetchLines = 64;  // 4 KiB ahead

// ---- unpacking ------------------------------------------------------------------------------------------------------

// The pairs (0,2) (4,6) (1,3) (5,7) of an int4 line, as int16 codes 0..15.
template <int kPair>
inline vi int4_pair(vi line) {
  constexpr int kShift = 4 * kPair;
  return (vi)(((vu)line >> kShift) & 0x000F000Fu);
}
// The pairs (0,2) (1,3) of an int8 line, sign-extended to int16.
typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
template <int kPair>
inline vi int8_pair(vi line) {
  const vs words = (vs)line;
  return kPair == 0 ? (vi)((vs)(words << 8) >> 8) : (vi)(words >> 8);
}
// Column c of a float line.
template <Kind kKind, int kColumn>
inline vf float_column(vi line) {
  if constexpr (kKind == Kind::kF32) return (vf)line;
  if constexpr (kKind == Kind::kBf16) return (vf)(kColumn == 0 ? (vu)line << 16 : (vu)line & 0xFFFF0000u);
  if constexpr (kKind == Kind::kF16) return f16_lanes(kColumn == 0 ? (vu)line & 0xFFFFu : (vu)line >> 16);
}

// Columns [column, column + n_columns) of kTilesNow tiles -> scratch [pair][tile][16] (int16 pairs).
template <int kTilesNow>
void unpack_int(const Matrix& w, int64_t tile, int64_t column, int64_t n_columns, uint32_t* scratch) {
  const int64_t n_lines = w.n_lines();
  const int64_t n_pairs = pad_to(n_columns, 8) / 2;
  for (int j = 0; j < kTilesNow; j++) {
    const uint32_t* lines = w.lines + (tile + j) * n_lines * 16;
    auto out = [&](int64_t pair, int v) { return scratch + (pair * kTilesNow + j) * 16 + v * kLanes; };
    for (int v = 0; v < kVectors; v++) {
      if (w.kind == Kind::kInt4) {
        const uint32_t* line = lines + column / 8 * 16 + v * kLanes;
        for (int64_t p = 0; p < n_pairs; p += 4, line += 16) {
          prefetch(line + kPrefetchLines * 16);
          const vi x = load_bits(line);
          store_bits(out(p, v), int4_pair<0>(x));
          store_bits(out(p + 1, v), int4_pair<1>(x));
          store_bits(out(p + 2, v), int4_pair<2>(x));
          store_bits(out(p + 3, v), int4_pair<3>(x));
        }
      } else {
        for (int64_t p = 0; p < n_pairs; p += 4) {
          const int64_t index = column / 4 + p / 2;  // of the first of two lines; the second may lie past the end
          const uint32_t* line = lines + index * 16 + v * kLanes;
          const vi first = load_bits(line);
          const vi second = index + 1 < n_lines ? load_bits(line + 16) : vi{};
          store_bits(out(p, v), int8_pair<0>(first));
          store_bits(out(p + 2, v), int8_pair<1>(first));
          store_bits(out(p + 1, v), int8_pair<0>(second));
          store_bits(out(p + 3, v), int8_pair<1>(second));
        }
      }
    }
  }
}

// Columns [column, column + n_columns) of kTilesNow tiles -> scratch [column][tile][16] (float32).
template <Kind kKind, int kTilesNow>
void unpack_float(const Matrix& w, int64_t tile, int64_t column, int64_t n_columns, float* scratch) {
  constexpr int kColumns = columns_per_dword(kKind);
  for (int j = 0; j < kTilesNow; j++) {
    for (int v = 0; v < kVectors; v++) {
      const uint32_t* line = w.lines + ((tile + j) * w.n_lines() + column / kColumns) * 16 + v * kLanes;
      float* out = scratch + j * 16 + v * kLanes;
      for (int64_t k = 0; k < n_columns; k += kColumns, line += 16) {
        const vi x = load_bits(line);
        store(out + k * kTilesNow * 16, float_column<kKind, 0>(x));
        if constexpr (kColumns == 2) store(out + (k + 1) * kTilesNow * 16, float_column<kKind, 1>(x));
      }
    }
  }
}

// ---- integer GEMM ---------------------------------------------------------------------------------------------------

struct IntBlock {
  const uint32_t* weights;  // scratch
  int64_t n_pairs;
  const uint32_t* pairs;  // of the first token
  const float* scales;
  const int32_t* starts;  // neg8_sums, or null where codes have no offset
  int64_t stride;         // tokens in the group
};

template <int kTilesNow, int kTokensNow>
inline void int_inner(const IntBlock& b, const vf (&w_scales)[kTiles * kVectors], float* y, int64_t ldy) {
  constexpr int kV = kTilesNow * kVectors;
  vi acc[kTokensNow][kV];
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) acc[t][v] = splat_int(b.starts ? b.starts[t] : 0);
  }
  const uint32_t* a = b.pairs;
  const uint32_t* w = b.weights;
  for (int64_t p = 0; p < b.n_pairs; p++, a += b.stride, w += kV * kLanes) {
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
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
    const vf a_scale = splat(b.scales[t]);
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) {
      float* out = y + t * ldy + v * kLanes;
      store(out, load(out) + __builtin_convertvector(acc[t][v], vf) * (w_scales[v] * a_scale));
    }
  }
}

template <int kTilesNow, int kTokensNow>
inline void int_inner_up_to(int n, const IntBlock& b, const vf (&w_scales)[kTiles * kVectors], float* y, int64_t ldy) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) return int_inner_up_to<kTilesNow, kTokensNow - 1>(n, b, w_scales, y, ldy);
  }
  int_inner<kTilesNow, kTokensNow>(b, w_scales, y, ldy);
}

template <int kTilesNow>
void int_gemm(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, uint32_t* scratch) {
  y += tile * kTileRows;
  for (int64_t m = 0; m < x.n_tokens; m++) {
    for (int i = 0; i < kTilesNow * kTileRows; i += kLanes) store(y + m * ldy + i, vf{});
  }
  const int64_t n_groups = w.n_groups(), n_blocks = x.n_blocks();
  for (int64_t block = 0; block < n_blocks; block++) {
    const int64_t column = block * x.block;
    const int64_t n_columns = column + x.block < w.n_columns ? x.block : w.n_columns - column;
    unpack_int<kTilesNow>(w, tile, column, n_columns, scratch);
    vf w_scales[kTiles * kVectors];
    for (int j = 0; j < kTilesNow; j++) {
      const uint16_t* scales = w.scales + ((tile + j) * n_groups + column / w.group_size) * 16;
      for (int v = 0; v < kVectors; v++) w_scales[j * kVectors + v] = from_f16(scales + v * kLanes);
    }
    for (int64_t m = 0; m < x.n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      IntBlock b;
      b.weights = scratch;
      b.n_pairs = pad_to(n_columns, 8) / 2;
      b.stride = n;
      for (int64_t t = 0; t < n; t += kTokens) {
        b.pairs = x.pairs + m * x.n_pairs() + column / 2 * n + t;
        b.scales = x.scales + m * n_blocks + block * n + t;
        b.starts = w.kind == Kind::kInt4 ? x.neg8_sums + m * n_blocks + block * n + t : nullptr;
        const int now = static_cast<int>(n - t < kTokens ? n - t : kTokens);
        int_inner_up_to<kTilesNow, kTokens>(now, b, w_scales, y + (m + t) * ldy, ldy);
      }
    }
  }
}

// ---- integer GEMV ---------------------------------------------------------------------------------------------------

// One line of int4 (four pairs) or int8 (two) into the accumulators of its pairs. a: the line's activation pairs; those of
// an int8 line are every second one of its eight columns.
template <Kind kKind>
inline void int_line(const uint32_t* line, const int32_t* a, vi (&acc)[columns_per_dword(kKind) / 2][kVectors]) {
  prefetch(line + kPrefetchLines * 16);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) {
    vi lanes = load_bits(line + v * kLanes);
    keep(lanes);
    if constexpr (kKind == Kind::kInt4) {
      acc[0][v] = dot(acc[0][v], int4_pair<0>(lanes), splat_int(a[0]));
      acc[1][v] = dot(acc[1][v], int4_pair<1>(lanes), splat_int(a[1]));
      acc[2][v] = dot(acc[2][v], int4_pair<2>(lanes), splat_int(a[2]));
      acc[3][v] = dot(acc[3][v], int4_pair<3>(lanes), splat_int(a[3]));
    } else {
      acc[0][v] = dot(acc[0][v], int8_pair<0>(lanes), splat_int(a[0]));
      acc[1][v] = dot(acc[1][v], int8_pair<1>(lanes), splat_int(a[2]));
    }
  }
}

// One token. An accumulator for each pair of a line hides the latency of the dot product; integer sums have no order.
template <Kind kKind>
void int_gemv(const Matrix& w, const IntActivations& x, float* y, int64_t tile) {
  constexpr int kPairs = columns_per_dword(kKind) / 2;
  const int64_t n_groups = w.n_groups(), n_blocks = x.n_blocks(), n_lines = w.n_lines();
  const int64_t blocks_a_group = (w.group_size + x.block - 1) / x.block;
  const uint32_t* line = w.lines + tile * n_lines * 16;
  const uint32_t* const end = line + n_lines * 16;
  const uint16_t* scales = w.scales + tile * n_groups * 16;
  const auto* a = reinterpret_cast<const int32_t*>(x.pairs);
  vf sum[kVectors] = {};
  for (int64_t block = 0, in_group = 0; block < n_blocks; block++) {
    const int64_t left = (end - line) / 16, whole = (x.block + 2 * kPairs - 1) / (2 * kPairs);
    const int64_t n = left < whole ? left : whole;
    vi acc[kPairs][kVectors] = {};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) acc[0][v] = splat_int(kKind == Kind::kInt4 ? x.neg8_sums[block] : 0);
    int64_t i = 0;
    for (; i + 2 <= n; i += 2, line += 32) {
      int_line<kKind>(line, a, acc);
      a += kKind == Kind::kInt4 ? 4 : 1;
      int_line<kKind>(line + 16, a, acc);
      a += kKind == Kind::kInt4 ? 4 : 3;
    }
    if (i < n) {
      int_line<kKind>(line, a, acc);
      a += 4, line += 16;
    }
    const vf a_scale = splat(x.scales[block]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      vi isum = acc[0][v];
#pragma GCC unroll 4
      for (int p = 1; p < kPairs; p++) isum += acc[p][v];
      sum[v] += __builtin_convertvector(isum, vf) * (from_f16(scales + v * kLanes) * a_scale);
    }
    if (++in_group == blocks_a_group) scales += 16, in_group = 0;
  }
  for (int v = 0; v < kVectors; v++) store(y + tile * kTileRows + v * kLanes, sum[v]);
}

void matmul_int(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                void* scratch) {
  if (x.n_tokens == 1) {
    for (int64_t tile = tile_begin; tile < tile_end; tile++) {
      w.kind == Kind::kInt4 ? int_gemv<Kind::kInt4>(w, x, y, tile) : int_gemv<Kind::kInt8>(w, x, y, tile);
    }
    return;
  }
  auto* buffer = static_cast<uint32_t*>(scratch);
  int64_t tile = tile_begin;
  for (; tile + kTiles <= tile_end; tile += kTiles) int_gemm<kTiles>(w, x, y, ldy, tile, buffer);
  for (; tile < tile_end; tile++) int_gemm<1>(w, x, y, ldy, tile, buffer);
}

// ---- float ----------------------------------------------------------------------------------------------------------

template <int kTilesNow, int kTokensNow>
inline void float_inner(const float* w, int64_t n_columns, const float* x, int64_t stride, float* y, int64_t ldy) {
  constexpr int kV = kTilesNow * kVectors;
  vf acc[kTokensNow][kV];
#pragma GCC unroll 16
  for (int t = 0; t < kTokensNow; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; v++) acc[t][v] = load(y + t * ldy + v * kLanes);
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
    for (int v = 0; v < kV; v++) store(y + t * ldy + v * kLanes, acc[t][v]);
  }
}

template <int kTilesNow, int kTokensNow>
inline void float_inner_up_to(int n, const float* w, int64_t n_columns, const float* x, int64_t stride, float* y,
                              int64_t ldy) {
  if constexpr (kTokensNow > 1) {
    if (n < kTokensNow) return float_inner_up_to<kTilesNow, kTokensNow - 1>(n, w, n_columns, x, stride, y, ldy);
  }
  float_inner<kTilesNow, kTokensNow>(w, n_columns, x, stride, y, ldy);
}

template <Kind kKind, int kTilesNow>
void float_gemm(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, float* scratch) {
  y += tile * kTileRows;
  for (int64_t m = 0; m < x.n_tokens; m++) {
    for (int i = 0; i < kTilesNow * kTileRows; i += kLanes) store(y + m * ldy + i, vf{});
  }
  const int64_t end = pad_to(w.n_columns, columns_per_dword(kKind));
  for (int64_t column = 0; column < end; column += kBlock) {
    const int64_t n_columns = end - column < kBlock ? end - column : kBlock;
    unpack_float<kKind, kTilesNow>(w, tile, column, n_columns, scratch);
    for (int64_t m = 0; m < x.n_tokens; m += kTokenGroup) {
      const int64_t n = x.n_tokens - m < kTokenGroup ? x.n_tokens - m : kTokenGroup;
      for (int64_t t = 0; t < n; t += kTokens) {
        const int now = static_cast<int>(n - t < kTokens ? n - t : kTokens);
        const float* values = x.values + m * x.n_padded() + column * n + t;
        float_inner_up_to<kTilesNow, kTokens>(now, scratch, n_columns, values, n, y + (m + t) * ldy, ldy);
      }
    }
  }
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
      prefetch(line + kPrefetchLines / 2 * 16);
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

template <Kind kKind>
void float_tiles(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                 float* scratch) {
  if (x.n_tokens == 1) {
    for (; tile + 4 <= tile_end; tile += 4) float_gemv<kKind, 4>(w, x, y, tile);
    for (; tile < tile_end; tile++) float_gemv<kKind, 1>(w, x, y, tile);
    return;
  }
  for (; tile + kTiles <= tile_end; tile += kTiles) float_gemm<kKind, kTiles>(w, x, y, ldy, tile, scratch);
  for (; tile < tile_end; tile++) float_gemm<kKind, 1>(w, x, y, ldy, tile, scratch);
}

void matmul_float(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                  void* scratch) {
  auto* buffer = static_cast<float*>(scratch);
  if (w.kind == Kind::kF16) float_tiles<Kind::kF16>(w, x, y, ldy, tile_begin, tile_end, buffer);
  if (w.kind == Kind::kBf16) float_tiles<Kind::kBf16>(w, x, y, ldy, tile_begin, tile_end, buffer);
  if (w.kind == Kind::kF32) float_tiles<Kind::kF32>(w, x, y, ldy, tile_begin, tile_end, buffer);
}
