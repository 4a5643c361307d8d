// GEMV and GEMM of a tiled weight matrix with prepared activations. A lane is a row, so sums never cross lanes.
//
// Integer form (docs/numerics.md 2): y += float(isum) * (w_scale * a_scale), blocks of columns ascending; of schemes with
// offsets then y += float(asum) * (w_offset * a_scale). Float form (3): one chain of fused multiply-adds a row, columns
// ascending. One token (decode.inc.h), a few (gemv.inc.h) and many (gemm.inc.h) are summed in the same order, so that it
// does not show which of them ran.

#include "weights.inc.h"
//
#include "decode.inc.h"
#include "gemm.inc.h"
#include "gemv.inc.h"

template <Codes kCodes, int kBits>
void int_tiles(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
               void* scratch) {
  if (x.n_tokens == 1) return int_decode_tiles<kCodes, kBits>(w, x, y, tile, tile_end, static_cast<float*>(scratch));
  if (x.n_tokens <= kTokens) {
    return int_gemv_up_to<kCodes, kBits, kTokens>(w, x, y, ldy, tile, tile_end, static_cast<float*>(scratch));
  }
  for_parts(tile, tile_end, x.n_tokens, [&](int64_t t, int64_t n_tiles, int64_t first, int64_t n_tokens) {
    int_gemm<kCodes, kBits>(w, x, y, ldy, t, n_tiles, first, n_tokens, static_cast<uint32_t*>(scratch));
  });
}

// Of codes that the inner loops do not tell apart, and of activations of kBits.
template <Codes kCodes>
void matmul_codes(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile, int64_t tile_end,
                  void* scratch) {
  x.bits == 8 ? int_tiles<kCodes, 8>(w, x, y, ldy, tile, tile_end, scratch)
              : int_tiles<kCodes, 16>(w, x, y, ldy, tile, tile_end, scratch);
}

void matmul_int(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                void* scratch) {
  auto run = [&](auto matmul_as) { matmul_as(w, x, y, ldy, tile_begin, tile_end, scratch); };
  switch (w.kind) {
    case Kind::kInt4:
    case Kind::kInt4z:
    case Kind::kInt4o:
      return run(matmul_codes<Codes::kNibbles>);
    case Kind::kE2m1:
    case Kind::kIq4nl:
    case Kind::kNl4:
      if (x.bits == 8) return run(int_tiles<Codes::kByteLevels, 8>);
      return run(int_tiles < by_words(Entries::kBytes) ? Codes::kWordLevels : Codes::kByteLevels, 16 >);
    case Kind::kNl3:
      if (x.bits == 8) return run(int_tiles<Codes::kThreeByteLevels, 8>);
      return run(int_tiles < by_words(Entries::kBytes) ? Codes::kThreeWordLevels : Codes::kThreeByteLevels, 16 >);
    case Kind::kNf4:
    case Kind::kFp4:
      return run(int_tiles<Codes::kWordLevels, 16>);
    case Kind::kInt8:
    case Kind::kInt8o:
      return run(matmul_codes<Codes::kBytes>);
    case Kind::kF16:
    case Kind::kBf16:
    case Kind::kF32:
      break;  // matmul_float
  }
  unknown("kind of weights");
}
