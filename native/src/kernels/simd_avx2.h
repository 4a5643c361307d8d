// AVX2 tiers: 32-byte vectors, FMA, F16C. W4CONV_VNNI selects vpdpwssd over vpmaddwd + vpaddd.
#pragma once
constexpr int kLanes = 8;
#include "vector_types.h"

constexpr int kTokens = 6;
constexpr int kByteTokens = 4;  // the same, with activations of 8 bits
constexpr int kTiles = 1;
constexpr int kStreams = 4;
constexpr int kStreamsAtOnce = 2;
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
// Always inlined: GCC takes a function that only fetches for one without an effect, and leaves its calls out.
[[gnu::always_inline]] inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
[[gnu::always_inline]] inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
// Past the caches; p is aligned to the vector. end_of_stream: before another thread reads what was written.
inline void stream(float* p, vf x) { _mm256_stream_ps(p, (__m256)x); }
inline void end_of_stream() { _mm_sfence(); }
// Keeps x in a register: without it, each use is reduce_lanes into a load of its own.
inline void keep(vi& x) { asm("" : "+x"(x)); }

// The levels of a codebook that are signed bytes, or those + 128, by bytes below 16.
struct ByteLevels {
  __m256i table;
  ByteLevels(const int16_t* p, bool biased) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    table = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0x88);
    if (biased) table = _mm256_xor_si256(table, _mm256_set1_epi8(-128));
  }
  vi of(vi codes) const { return (vi)_mm256_shuffle_epi8(table, (__m256i)codes); }
};
constexpr bool kAllByWords = false;  // whether those that fit bytes are better looked up as words, too

// The levels of a codebook as int16, for activations in the order of columns. operand: of dword kDword of the activations.
// Cheaper, `first` and `second` are those of columns 0..3 or 4..7 of half the rows each, a row in two lanes.
constexpr bool kWordsInOrder = true;
struct WordLevels {
  __m256i low, high;
  explicit WordLevels(const int16_t* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), byte = _mm256_set1_epi16(0xFF);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(words, byte), _mm256_srli_epi16(words, 8));
    low = _mm256_permute4x64_epi64(bytes, 0x88), high = _mm256_permute4x64_epi64(bytes, 0xDD);
  }
  struct Half {
    __m256i first, second;
  };
  template <int kHalf>
  Half half(vi line) const {
    const __m256i codes = (__m256i)((vi)((vu)line >> (4 * kHalf)) & 0x0F0F0F0F);
    const __m256i l = _mm256_shuffle_epi8(low, codes), h = _mm256_shuffle_epi8(high, codes);
    return {_mm256_unpacklo_epi8(l, h), _mm256_unpackhi_epi8(l, h)};
  }
  template <int kDword>
  vi operand(vi line) const {
    const Half h = half<kDword / 2>(line);
    constexpr int kLanesOf = kDword % 2 == 0 ? 0x88 : 0xDD;
    return (vi)_mm256_shuffle_ps((__m256)h.first, (__m256)h.second, kLanesOf);
  }
  // One token: the sums p and q of a line's products with the activations a; `total` is that of both.
  void add(vi line, const int32_t* a, vi& p, vi& q) const {
    int64_t pairs[2];
    __builtin_memcpy(pairs, a, sizeof pairs);
    const Half h0 = half<0>(line), h1 = half<1>(line);
    const vi a0 = (vi)_mm256_set1_epi64x(pairs[0]), a1 = (vi)_mm256_set1_epi64x(pairs[1]);
    p = dot(dot(p, (vi)h0.first, a0), (vi)h1.first, a1);
    q = dot(dot(q, (vi)h0.second, a0), (vi)h1.second, a1);
  }
  static vi total(vi p, vi q) { return (vi)_mm256_hadd_epi32((__m256i)p, (__m256i)q); }
};

struct Levels {
  __m256 low, high;
  explicit Levels(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
  vf of(vi index) const {  // a permutation looks at three bits; the fourth, moved into the sign, chooses between two
    const __m256i i = (__m256i)index;
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                (__m256)_mm256_slli_epi32(i, 28));
  }
  // Where it is known that index is below 8, or from 8 on.
  vf of_low(vi index) const { return (vf)_mm256_permutevar8x32_ps(low, (__m256i)index); }
  vf of_high(vi index) const { return (vf)_mm256_permutevar8x32_ps(high, (__m256i)index); }
};
