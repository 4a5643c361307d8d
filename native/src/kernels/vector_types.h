// Vectors of kLanes 32-bit lanes as compiler extensions: + - * / compare shift work on them on every target.
#pragma once
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vsu __attribute__((vector_size(4 * kLanes)));
typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
typedef int8_t vb __attribute__((vector_size(kLanes)));
typedef int8_t vb_unaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
// The doubles that fit into a vector: half as many.
typedef double vw __attribute__((vector_size(4 * kLanes)));
typedef int64_t vwi __attribute__((vector_size(4 * kLanes)));
constexpr int kWideLanes = kLanes / 2;

constexpr int kVectors = 16 / kLanes;  // vectors that hold one value for each of the 16 rows of a tile

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline vi load_bits(const void* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
inline void store_bits(void* p, vi x) { *reinterpret_cast<vi_unaligned*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }
inline vi splat_int(int32_t x) { return x - vi{}; }
inline vu splat_bits(uint32_t x) { return x - vu{}; }
inline vu select_bits(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }
inline vf select(vi mask, vf yes, vf no) { return (vf)select_bits(mask, (vu)yes, (vu)no); }

// Lane i of the result is lane i + kBy of x; the last kBy lanes are of no use.
template <int kBy, class V>
inline V lanes_down(V x) {
  constexpr int kCount = sizeof(V) / sizeof(x[0]);
  decltype(x < x) from;
  for (int i = 0; i < kCount; i++) from[i] = (i + kBy) % kCount;
  return __builtin_shuffle(x, from);
}
// f of all lanes, in lane 0: of the lower half and the upper, of the quarters of that, and so on. kHalf: half the lanes.
template <int kHalf, class V, class F>
inline V folded(V x, const F& f) {
  x = f(x, lanes_down<kHalf>(x));
  if constexpr (kHalf > 1) {
    return folded<kHalf / 2>(x, f);
  } else {
    return x;
  }
}
