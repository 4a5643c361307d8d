// AVX-512 tiers: 64-byte vectors. W4CONV_VNNI selects vpdpwssd over vpmaddwd + vpaddd.
#pragma once
constexpr int kLanes = 16;
#include "vector_types.h"

constexpr int kTokens = 12;
constexpr int kTiles = 2;

#ifdef W4CONV_VNNI
inline const char* dot_instruction() { return "vpdpwssd zmm"; }
inline vi dot(vi acc, vi w, vi a) { return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
#else
inline const char* dot_instruction() { return "vpmaddwd zmm"; }
inline vi dot(vi acc, vi w, vi a) { return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)a); }
#endif
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf sqrt_of(float x) { return (vf)_mm512_sqrt_ps(_mm512_set1_ps(x)); }
inline vf f16_lanes(vu h) { return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h)); }
inline vf from_f16(const uint16_t* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void to_f16(vf x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Keeps x in a register: without it, each use is folded into a load of its own.
inline void keep(vi& x) { asm("" : "+v"(x)); }
