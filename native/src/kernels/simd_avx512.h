// AVX-512 tiers: 64-byte vectors. W4CONV_VNNI selects vpdpwssd over vpmaddwd + vpaddd.
#pragma once
constexpr int kLanes = 16;
#include "vector_types.h"

constexpr int kTokens = 12;
constexpr int kByteTokens = 12;  // the same, with activations of 8 bits
constexpr int kTiles = 2;
constexpr int kStreams = 4;
constexpr int kStreamsAtOnce = 4;

#ifdef W4CONV_VNNI
inline const char* dot_instruction() { return "vpdpwssd zmm"; }
inline vi dot(vi acc, vi w, vi a) { return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
constexpr bool kWideBytes = true;
inline vi dot_bytes(vi acc, vi w0, vi a0, vi w1, vi a1) {
  acc = (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w0, (__m512i)a0);
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w1, (__m512i)a1);
}
#else
inline const char* dot_instruction() { return "vpmaddwd zmm"; }
inline vi dot(vi acc, vi w, vi a) { return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)a); }
constexpr bool kWideBytes = false;
// Two products of a weight below 16 and an activation lie within 3810, four within int16.
inline vi dot_bytes(vi acc, vi w0, vi a0, vi w1, vi a1) {
  const __m512i first = _mm512_maddubs_epi16((__m512i)w0, (__m512i)a0);
  const __m512i pairs = _mm512_add_epi16(first, _mm512_maddubs_epi16((__m512i)w1, (__m512i)a1));
  return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#endif
constexpr bool kFusedMultiplyAdd = true;  // as an instruction
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vw doubles_of(const float* p) { return (vw)_mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline vf sqrt_of(float x) { return (vf)_mm512_sqrt_ps(_mm512_set1_ps(x)); }
inline vf f16_lanes(vu h) { return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h)); }
inline vb low_bytes(vi x) { return __builtin_convertvector(x, vb); }
inline vi from_bytes(const int8_t* p) {
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vu from_u16(const uint16_t* p) {
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf from_f16(const uint16_t* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void to_f16(vf x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
// Always inlined: GCC takes a function that only fetches for one without an effect, and leaves its calls out.
[[gnu::always_inline]] inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
[[gnu::always_inline]] inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
// Past the caches; p is aligned to the vector. end_of_stream: before another thread reads what was written.
inline void stream(float* p, vf x) { _mm512_stream_ps(p, (__m512)x); }
inline void end_of_stream() { _mm_sfence(); }
// Keeps x in a register: without it, each use is reduce_lanes into a load of its own.
inline void keep(vi& x) { asm("" : "+v"(x)); }

// The levels of a codebook that are signed bytes, or those + 128, by bytes below 16.
struct ByteLevels {
  __m512i table;
  ByteLevels(const int16_t* p, bool biased) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    table = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(words));
    if (biased) table = _mm512_xor_si512(table, _mm512_set1_epi8(-128));
  }
  vi of(vi codes) const { return (vi)_mm512_shuffle_epi8(table, (__m512i)codes); }
};
constexpr bool kAllByWords = true;  // whether those that fit bytes are better looked up as words, too

// The levels of a codebook as int16. operand: of dword kDword of the activations.
constexpr bool kWordsInOrder = false;
struct WordLevels {
  __m512i table;  // twice, as a permutation looks at five bits
  explicit WordLevels(const int16_t* p)
      : table(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))) {}
  template <int kDword>
  vi operand(vi line) const {
    return (vi)_mm512_permutexvar_epi16((__m512i)((vu)line >> (4 * kDword)), table);
  }
  // One token: the sums p and q of a line's products with the activations a; `total` is that of both.
  void add(vi line, const int32_t* a, vi& p, vi& q) const {
    p = dot(p, operand<0>(line), splat_int(a[0])), q = dot(q, operand<1>(line), splat_int(a[1]));
    keep(p), keep(q);
    p = dot(p, operand<2>(line), splat_int(a[2])), q = dot(q, operand<3>(line), splat_int(a[3]));
  }
  static vi total(vi p, vi q) { return p + q; }
};

struct Levels {
  __m512 all;
  explicit Levels(const float* p) : all(_mm512_loadu_ps(p)) {}
  vf of(vi index) const { return (vf)_mm512_permutexvar_ps((__m512i)index, all); }
  vf of_low(vi index) const { return of(index); }
  vf of_high(vi index) const { return of(index); }
};
