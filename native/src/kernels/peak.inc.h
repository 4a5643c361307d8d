// Dot products from registers: what the tier could do if neither memory nor unpacking took any time. The ceiling of prefill.
#pragma once

constexpr int64_t kPeakRounds = 100000;

// The compiler may not know what is in x, so that no iteration can be taken out of the loop.
template <class V>
inline void hide(V& x) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

// kChains sums, enough to hide the latency of a step; kOperands in turn, so that no product serves two of them. Both have
// to stay in registers.
template <int kChains, int kOperands, class V, class Step>
int64_t run_chains(V w, Step step) {
  V acc[kChains] = {}, a[kOperands];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) hide(acc[i]);
#pragma GCC unroll 12
  for (int i = 0; i < kOperands; i++) {
    a[i] = w;
    hide(a[i]);
  }
  for (int64_t n = 0; n < kPeakRounds; n++) {
    hide(w);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) acc[i] = step(acc[i], w, a[i % kOperands]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) hide(acc[i]);
  return kPeakRounds * kChains * kLanes;
}

// Returns the multiplications that were done.
int64_t peak_int() {
  constexpr int n = kLanes == 16 ? 12 : 6;
  return 2 * run_chains<n, n>(splat_int(0x10001), [](vi acc, vi w, vi a) { return dot(acc, w, a); });
}
int64_t peak_bytes() {
  constexpr int n = kLanes == 16 ? 12 : 6;
  return 8 * run_chains<n, n>(splat_int(0x01010101), [](vi acc, vi w, vi a) { return dot_bytes(acc, w, a, w, a); });
}
int64_t peak_float() {
  return run_chains<12, 1>(splat(1.0f), [](vf acc, vf w, vf a) { return fma(w, a, acc); });
}
