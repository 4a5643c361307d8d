// Products of a tiled weight matrix with prepared activations. A lane is a row, so sums never cross lanes.
//
// Integer form (docs/numerics.md 2): y += float(isum) * (w_scale * a_scale), blocks of columns ascending; of schemes with
// offsets then y += float(asum) * (w_offset * a_scale). Float form (3): one chain of fused multiply-adds a row, or a block
// of it, columns ascending. GEMV and GEMM (gemv.inc.h, gemm.inc.h) sum in the same order, so that it does not show which of
// them ran.

#include "weights.inc.h"
//
#include "gemm.inc.h"
#include "gemv.inc.h"

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
  if (w.kind == Kind::kIq4nl) run(bytes ? int_tiles<Kind::kIq4nl, 8> : int_tiles<Kind::kIq4nl, 16>);
  if (w.kind == Kind::kInt8) run(bytes ? int_tiles<Kind::kInt8, 8> : int_tiles<Kind::kInt8, 16>);
  if (w.kind == Kind::kInt8o) run(bytes ? int_tiles<Kind::kInt8o, 8> : int_tiles<Kind::kInt8o, 16>);
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
