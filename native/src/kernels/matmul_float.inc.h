// matmul_float: kinds whose activations stay float32 (docs/numerics.md 3).

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

template <Kind kKind>
void float_tiles(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                 void* scratch) {
  if (x.n_tokens == 1) {
    for (; tile + 4 <= tile_end; tile += 4) float_gemv<kKind, 4>(w, x, y, tile);
    for (; tile < tile_end; tile++) float_gemv<kKind, 1>(w, x, y, tile);
    return;
  }
  for_parts(tile, tile_end, x.n_tokens, [&](int64_t t, int64_t n_tiles, int64_t first, int64_t n_tokens) {
    float_gemm<kKind>(w, x, y, ldy, t, n_tiles, first, n_tokens, static_cast<float*>(scratch));
  });
}

void matmul_float(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                  void* scratch) {
  auto run = [&](auto tiles) { tiles(w, x, y, ldy, tile_begin, tile_end, scratch); };
  switch (w.kind) {
    case Kind::kF16:
      return run(float_tiles<Kind::kF16>);
    case Kind::kBf16:
      return run(float_tiles<Kind::kBf16>);
    case Kind::kF32:
      return run(float_tiles<Kind::kF32>);
    case Kind::kInt4:
    case Kind::kInt4z:
    case Kind::kInt4o:
    case Kind::kE2m1:
    case Kind::kIq4nl:
    case Kind::kNl4:
    case Kind::kNl3:
    case Kind::kNf4:
    case Kind::kFp4:
    case Kind::kInt8:
    case Kind::kInt8o:
      break;  // matmul_int
  }
  unknown("kind of weights");
}
