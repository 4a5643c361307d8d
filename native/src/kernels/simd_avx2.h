// AVX2 tiers: 32-byte vectors, FMA, F16C. W4CONV_VNNI selects vpdpwssd over vpmaddwd + vpaddd.
#pragma once
constexpr int kLanes = 8;
#include "vector_types.h"

constexpr int kTokens = 6;
constexpr int kByteTokens = 4;  // the same, with activations of 8 bits
constexpr int kTiles = 1;
constexpr int kStreams = 2;
#ifdef W4CONV_VNNI
// AVX-VNNI has an encoding of its own; that of AVX-512 does the same, for a build to test the tier where only that exists.
#ifdef __AVXVNNI__
#define W4CONV_DPWSSD _mm256_dpwssd_avx_epi32
#define W4CONV_DPBUSD _mm256_dpbusd_avx_epi32
#else
#define W4CONV_DPWSSD _mm256_dpwssd_epi32
#define W4CONV_DPBUSD _mm256_dpbusd_epi32
#endif
inline const char* dot_instruction() { return "vpdpwssd ymm"; }
inline vi dot(vi acc, vi w, vi a) { return (vi)W4CONV_DPWSSD((__m256i)acc, (__m256i)w, (__m256i)a); }
constexpr bool kWideBytes = true;
inline vi dot_bytes(vi acc, vi w0, vi a0, vi w1, vi a1) {
  acc = (vi)W4CONV_DPBUSD((__m256i)acc, (__m256i)w0, (__m256i)a0);
  return (vi)W4CONV_DPBUSD((__m256i)acc, (__m256i)w1, (__m256i)a1);
}
#else
inline const char* dot_instruction() { return "vpmaddwd ymm"; }
inline vi dot(vi acc, vi w, vi a) { return acc + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)a); }
constexpr bool kWideBytes = false;
// Two products of a weight below 16 and an activation lie within 3810, four within int16.
inline vi dot_bytes(vi acc, vi w0, vi a0, vi w1, vi a1) {
  const __m256i first = _mm256_maddubs_epi16((__m256i)w0, (__m256i)a0);
  const __m256i pairs = _mm256_add_epi16(first, _mm256_maddubs_epi16((__m256i)w1, (__m256i)a1));
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif
constexpr bool kFusedMultiplyAdd = true;  // as an instruction
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vw doubles_of(const float* p) { return (vw)_mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline vf sqrt_of(float x) { return (vf)_mm256_sqrt_ps(_mm256_set1_ps(x)); }
inline vf f16_lanes(vu h) {
  const __m256i x = (__m256i)h;
  return (vf)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
// By way of words: at once, GCC 12 takes lane after lane.
inline vb low_bytes(vi x) { return __builtin_convertvector(__builtin_convertvector(x, vh), vb); }
inline vi from_bytes(const int8_t* p) {
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline vu from_u16(const uint16_t* p) {
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf from_f16(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void to_f16(vf x, uint16_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Past the caches; p is aligned to the vector. end_of_stream: before another thread reads what was written.
inline void stream(float* p, vf x) { _mm256_stream_ps(p, (__m256)x); }
inline void end_of_stream() { _mm_sfence(); }
// Keeps x in a register: without it, each use is reduce_lanes into a load of its own.
inline void keep(vi& x) { asm("" : "+x"(x)); }

// Of each byte below 16, the code of a weight.
inline vi looked_up(const int8_t* bytes, vi codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  return (vi)_mm256_shuffle_epi8(table, (__m256i)codes);
}

struct Levels {
  __m256 low, high;
  explicit Levels(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
  vf of(vi index) const {  // a permutation looks at three bits; the fourth, moved into the sign, chooses between two
    const __m256i i = (__m256i)index;
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                (__m256)_mm256_slli_epi32(i, 28));
  }
};
