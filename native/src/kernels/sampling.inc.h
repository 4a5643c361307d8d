// Weights of a sampler (docs/numerics.md 8). Rows are padded with -infinity to a multiple of kPeakBlock.

// Weights as whole numbers: the low bits of a sum with the magic number, rounded half to even.
inline vwi whole_weights(const float* w) {
  constexpr double kMagic = 0x1.8p52;
  const vw scaled = doubles_of(w) * kWholeWeight + kMagic;
  return (vwi)scaled - 0x4338000000000000;
}
inline uint64_t sum_of_lanes(vwi x) {
  uint64_t out = 0;
  for (int i = 0; i < kWideLanes; i++) out += static_cast<uint64_t>(x[i]);
  return out;
}

// out[b]: the largest of block b; NaN where the block has one.
void peaks(const float* x, int64_t n, float* out) {
  for (int64_t b = 0; b < n; b += kPeakBlock) {
    vf most = load(x + b);
    vi sound = (vi)(most == most);
    for (int i = kLanes; i < kPeakBlock; i += kLanes) {
      const vf v = load(x + b + i);
      sound &= (vi)(v == v);
      most = select((vi)(v > most), v, most);
    }
    alignas(64) float lanes[kLanes];
    store(lanes, select(sound, most, most + splat(__builtin_nanf(""))));
    float top = lanes[0];
    for (int i = 1; i < kLanes; i++) top = lanes[i] > top || lanes[i] != lanes[i] ? lanes[i] : top;
    out[b / kPeakBlock] = top;
  }
}

uint64_t weigh(const float* x, int64_t n, float top, float temperature, float* w) {
  vwi sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    store(w + i, exp_of((load(x + i) - splat(top)) / splat(temperature)));
    sum += whole_weights(w + i) + whole_weights(w + i + kWideLanes);
  }
  return sum_of_lanes(sum);
}

uint64_t sum_weights(const float* w, int64_t n, float least) {
  vwi sum = {};
  const vw bound = vw{} + static_cast<double>(least);
  for (int64_t i = 0; i < n; i += kWideLanes) sum += (vwi)(doubles_of(w + i) >= bound) & whole_weights(w + i);
  return sum_of_lanes(sum);
}
