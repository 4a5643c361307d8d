// Scalar tier: plain C++ on 16-byte vectors, which every compiler target can lower (SSE2, NEON, or scalar code).
#pragma once

constexpr int kLanes = 4;
#include "vector_types.h"

// Tokens and row tiles that an inner kernel holds in registers.
constexpr int kTokens = 2;
constexpr int kByteTokens = 2;  // the same, with activations of 8 bits
constexpr int kTiles = 1;
constexpr int kStreams = 1;        // tiles that a GEMV of one token reads side by side
constexpr int kStreamsAtOnce = 1;  // those of them whose sums are in registers at a time
// Whether dot_bytes takes any unsigned byte as a weight, or only codes of 4 bits.
constexpr bool kWideBytes = false;

inline const char* dot_instruction() { return "multiply"; }

// acc + w.lo * a.lo + w.hi * a.hi, each lane a pair of int16.
inline vi dot(vi acc, vi w, vi a) {
  const vi low = ((w << 16) >> 16) * ((a << 16) >> 16);
  return acc + low + (w >> 16) * (a >> 16);
}
// acc + the sums of four products of bytes, twice: weights unsigned, activations signed and above -128.
inline vi dot_bytes(vi acc, vi w0, vi a0, vi w1, vi a1) {
  const auto pairs = [](vi x) { return (vi)((vu)x >> 8 & 0x00FF00FFu); };
  const auto signed_even = [](vi x) { return (vi)((vs)((vs)x << 8) >> 8); };
  const auto signed_odd = [](vi x) { return (vi)((vs)x >> 8); };
  acc = dot(dot(acc, w0 & 0x00FF00FF, signed_even(a0)), pairs(w0), signed_odd(a0));
  return dot(dot(acc, w1 & 0x00FF00FF, signed_even(a1)), pairs(w1), signed_odd(a1));
}
constexpr bool kFusedMultiplyAdd = false;  // as an instruction
inline vf fma(vf a, vf b, vf c) {
  vf out;
  for (int i = 0; i < kLanes; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
}
inline vw doubles_of(const float* p) { return vw{p[0], p[1]}; }
inline vf sqrt_of(float x) { return splat(__builtin_sqrtf(x)); }

// FP16 in the low half of each lane -> float32, exactly.
inline vf f16_lanes(vu h) {
  const vu sign = (h & 0x8000u) << 16;
  const vu magnitude = h & 0x7FFFu;
  // Normal numbers: move the exponent by 112. Subnormal ones: an integer times 2^-24.
  const vu normal = (magnitude << 13) + (112u << 23);
  const vu special = (magnitude << 13) | 0x7F800000u;
  const vf tiny = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
  const vu bits = select_bits((vi)(magnitude < 0x400u), (vu)tiny, normal);
  return (vf)(select_bits((vi)(magnitude >= 0x7C00u), special, bits) | sign);
}
inline vb low_bytes(vi x) { return __builtin_convertvector(x, vb); }
inline vi from_bytes(const int8_t* p) {
  vi out;
  for (int i = 0; i < kLanes; i++) out[i] = p[i];
  return out;
}
inline vu from_u16(const uint16_t* p) { return vu{p[0], p[1], p[2], p[3]}; }
inline vf from_f16(const uint16_t* p) { return f16_lanes(from_u16(p)); }

// Round half to even, to infinity beyond FP16.
inline void to_f16(vf x, uint16_t* p) {
  const vu bits = (vu)x;
  const vu sign = (bits >> 16) & 0x8000u;
  const vu magnitude = bits & 0x7FFFFFFFu;
  const vu normal = ((magnitude - (112u << 23)) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 2^-1 * 1.0 leaves the rounded subnormal in the low mantissa bits.
  const vu tiny = (vu)((vf)magnitude + 0.5f) - 0x3F000000u;
  vu half = select_bits((vi)(magnitude < 0x38800000u), tiny, normal);
  half = select_bits((vi)(magnitude >= 0x477FF000u), splat_bits(0x7C00u), half);
  half = select_bits((vi)(magnitude > 0x7F800000u), splat_bits(0x7E00u), half);
  half |= sign;
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<uint16_t>(half[i]);
}
inline void stream(float* p, vf x) { store(p, x); }
inline void end_of_stream() {}
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p); }
[[gnu::always_inline]] inline void prefetch_far(const void*) {}
inline void keep(vi&) {}

// The levels of a codebook that are signed bytes, or those + 128, by bytes below 16.
struct ByteLevels {
  uint8_t levels[16];
  ByteLevels(const int16_t* p, bool biased) {
    for (int i = 0; i < 16; i++) levels[i] = static_cast<uint8_t>(p[i] + (biased ? 128 : 0));
  }
  vi of(vi codes) const {
    vi out;
    for (int i = 0; i < kLanes; i++) {
      uint32_t bits = 0;
      for (int j = 0; j < 32; j += 8) bits |= uint32_t{levels[codes[i] >> j & 15]} << j;
      out[i] = static_cast<int32_t>(bits);
    }
    return out;
  }
};
constexpr bool kAllByWords = true;  // whether those that fit bytes are better looked up as words, too

// The levels of a codebook as int16. operand: of dword kDword of the activations.
constexpr bool kWordsInOrder = false;
struct WordLevels {
  const int16_t* levels;
  explicit WordLevels(const int16_t* p) : levels(p) {}
  template <int kDword>
  vi operand(vi line) const {
    const vi codes = line >> (4 * kDword);
    vi out;
    for (int i = 0; i < kLanes; i++) {
      const auto low = static_cast<uint16_t>(levels[codes[i] & 15]);
      const auto high = static_cast<uint16_t>(levels[codes[i] >> 16 & 15]);
      out[i] = static_cast<int32_t>(uint32_t{high} << 16 | low);
    }
    return out;
  }
  // One token: the sums p and q of a line's products with the activations a; `total` is that of both.
  void add(vi line, const int32_t* a, vi& p, vi& q) const {
    p = dot(p, operand<0>(line), splat_int(a[0])), q = dot(q, operand<1>(line), splat_int(a[1]));
    p = dot(p, operand<2>(line), splat_int(a[2])), q = dot(q, operand<3>(line), splat_int(a[3]));
  }
  static vi total(vi p, vi q) { return p + q; }
};

// The 16 levels of a codebook, by the low 4 bits of each lane; the bits above may be anything.
struct Levels {
  const float* levels;
  explicit Levels(const float* p) : levels(p) {}
  vf of(vi index) const {
    vf out;
    for (int i = 0; i < kLanes; i++) out[i] = levels[index[i] & 15];
    return out;
  }
  vf of_low(vi index) const { return of(index); }
  vf of_high(vi index) const { return of(index); }
};
