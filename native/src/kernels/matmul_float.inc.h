// matmul_float: kinds whose activations stay float32 (docs/numerics.md 3).

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
  switch (w.kind) {
    case Kind::kNf4:
      return run(float_tiles<Kind::kNf4>);
    case Kind::kFp4:
      return run(float_tiles<Kind::kFp4>);
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
    case Kind::kInt8:
    case Kind::kInt8o:
      break;  // matmul_int (takes_integers)
  }
  unknown("kind of weights");
}
