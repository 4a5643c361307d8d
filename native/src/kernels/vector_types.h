// Vectors of kLanes 32-bit lanes as compiler extensions: + - * / compare shift work on them on every target.
#pragma once
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vsu __attribute__((vector_size(4 * kLanes)));
typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
typedef int16_t vh __attribute__((vector_size(2 * kLanes)));
typedef int16_t vh_unaligned __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
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
inline vu select_bits(vi mask, vu yes, vu no) { return mask ? yes : no; }
inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

// Lane i of the result is lane from(i) of a and, counted on, b. from: a lambda without captures.
template <class V, class F, size_t... kLane>
inline V shuffled(V a, V b, F, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, F{}(static_cast<int>(kLane))...);
}
template <class V, class F>
inline V shuffled(V a, V b, F from) {
  return shuffled(a, b, from, std::make_index_sequence<sizeof(V) / sizeof(a[0])>());
}
// Lane i of the result is lane i + kBy of x; the last kBy lanes are of no use.
template <int kBy, class V>
inline V lanes_down(V x) {
  return shuffled(x, x, [](int i) { return (i + kBy) % static_cast<int>(sizeof(V) / sizeof(V{}[0])); });
}
// Horizontal f (a sum, a maximum) of all lanes, in lane 0: of the lower half and the upper, of the quarters of that, and so
// on. kHalf: half the lanes.
template <int kHalf, class V, class F>
inline V reduce_lanes(V x, const F& f) {
  x = f(x, lanes_down<kHalf>(x));
  if constexpr (kHalf > 1) {
    return reduce_lanes<kHalf / 2>(x, f);
  } else {
    return x;
  }
}

// Blocks of kSize x kSize off the diagonals of those twice as large change places, of ever larger ones.
template <int kSize>
[[gnu::always_inline]] inline void swap_blocks(vf (&x)[kLanes]) {
  if constexpr (kSize < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i & kSize) continue;
      const vf a = x[i], b = x[i + kSize];
      x[i] = shuffled(a, b, [](int j) { return j & kSize ? kLanes + j - kSize : j; });
      x[i + kSize] = shuffled(a, b, [](int j) { return j & kSize ? kLanes + j : j + kSize; });
    }
    swap_blocks<2 * kSize>(x);
  }
}
// Rows become columns: first within squares of 4 lanes, for which every target has instructions.
[[gnu::always_inline]] inline void transpose(vf (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const auto low = [](int j) { return j / 4 * 4 + j % 4 / 2 + j % 2 * kLanes; };
    const auto high = [](int j) { return j / 4 * 4 + j % 4 / 2 + j % 2 * kLanes + 2; };
    const vf ab0 = shuffled(x[i], x[i + 1], low), ab2 = shuffled(x[i], x[i + 1], high);
    const vf cd0 = shuffled(x[i + 2], x[i + 3], low), cd2 = shuffled(x[i + 2], x[i + 3], high);
    const auto left = [](int j) { return j / 4 * 4 + j % 2 + j % 4 / 2 * kLanes; };
    const auto right = [](int j) { return j / 4 * 4 + j % 2 + j % 4 / 2 * kLanes + 2; };
    x[i] = shuffled(ab0, cd0, left);
    x[i + 1] = shuffled(ab0, cd0, right);
    x[i + 2] = shuffled(ab2, cd2, left);
    x[i + 3] = shuffled(ab2, cd2, right);
  }
  swap_blocks<4>(x);
}
