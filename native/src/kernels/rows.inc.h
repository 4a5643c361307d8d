// Operations on one padded row of float32. Reductions run in 16 lanes (lane j takes elements j, j + 16, ...) and end in one
// fixed tree, whatever the vector width.

inline float sum16(const vf (&v)[kVectors]) {
  alignas(64) float s[16];
  for (int i = 0; i < kVectors; i++) store(s + i * kLanes, v[i]);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  }
  return s[0];
}

// exp(x), relative error below 2e-7; 0 below -87.3, and no more than exp(88). NaN stays NaN.
// x = n ln 2 + r, a polynomial in r (coefficients of Cephes' expf), times 2^n.
inline vf exp_of(vf x) {
  vf clamped = select((vi)(x < splat(-87.3f)), splat(-87.3f), x);
  clamped = select((vi)(clamped > splat(88.0f)), splat(88.0f), clamped);
  const vf magic = splat(0x1.8p23f);  // adding it rounds to an integer, half to even
  const vf n = fma(clamped, splat(0x1.715476p0f), magic) - magic;
  vf r = fma(n, splat(-0x1.62e4p-1f), clamped);
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  return select((vi)(x < splat(-87.3f)), vf{}, p * (vf)exponent);
}

void rmsnorm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  vf squares[kVectors] = {};
  const int64_t padded = pad_to(n, 16);
  for (int64_t i = 0; i < padded; i += 16) {
    for (int v = 0; v < kVectors; v++) {
      const vf xv = load(x + i + v * kLanes);
      squares[v] = fma(xv, xv, squares[v]);
    }
  }
  const float mean = sum16(squares) / static_cast<float>(n);
  const vf r = splat(1.0f) / sqrt_of(mean + eps);
  for (int64_t i = 0; i < padded; i += kLanes) store(out + i, load(x + i) * r * load(weight + i));
}

// tanh(x), absolute error below 2e-7.
inline vf tanh_of(vf x) { return splat(1.0f) - splat(2.0f) / (exp_of(x + x) + splat(1.0f)); }

inline vf softcap_of(vf x, vf cap) { return cap * tanh_of(x / cap); }
void softcap(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, softcap_of(load(x + i), splat(cap)));
}

void softmax(const float* x, int64_t n, float* out) {
  float top = x[0];
  for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
  vf sums[kVectors] = {};
  for (int64_t i = 0; i < pad_to(n, 16); i += 16) {
    for (int v = 0; v < kVectors; v++) {
      alignas(64) float lanes[kLanes];
      store(lanes, exp_of(load(x + i + v * kLanes) - splat(top)));
      for (int j = 0; j < kLanes; j++) lanes[j] = i + v * kLanes + j < n ? lanes[j] : 0.0f;
      store(out + i + v * kLanes, load(lanes));
      sums[v] += load(lanes);
    }
  }
  const vf sum = splat(sum16(sums));
  for (int64_t i = 0; i < pad_to(n, 16); i += kLanes) store(out + i, load(out + i) / sum);
}

inline vf sigmoid_times(vf g, vf x) { return g / (splat(1.0f) + exp_of(-x)); }  // g * sigmoid(x)
inline vf at_most(vf x, float top) { return select((vi)(x > splat(top)), splat(top), x); }

template <Activation kActivation>
inline vf gated_lanes(vf g, vf u) {
  if constexpr (kActivation == Activation::kSilu) return sigmoid_times(g, g) * u;
  // 0.5 g (1 + tanh(y)) = g sigmoid(2 y), y = sqrt(2 / pi) (g + 0.044715 g^3)
  if constexpr (kActivation == Activation::kGeluTanh) {
    const vf cubic = fma(g * g * splat(0.044715f), g, g);
    return sigmoid_times(g, splat(1.5957691216057308f) * cubic) * u;
  }
  const vf gate = at_most(g, 7.0f);
  const vf up = at_most(select((vi)(u < splat(-7.0f)), splat(-7.0f), u), 7.0f);
  return sigmoid_times(gate, splat(1.702f) * gate) * (up + splat(1.0f));
}
template <Activation kActivation>
void gated_as(const float* gate, const float* up, int64_t n, float* out) {
  constexpr int64_t kAhead = 512;  // both rows come from memory: a GEMM writes around the caches
  for (int64_t i = 0; i < n; i += kLanes) {
    prefetch(gate + i + kAhead);
    prefetch(up + i + kAhead);
    store(out + i, gated_lanes<kActivation>(load(gate + i), load(up + i)));
  }
}
void gated(Activation activation, const float* gate, const float* up, int64_t n, float* out) {
  switch (activation) {
    case Activation::kSilu:
      return gated_as<Activation::kSilu>(gate, up, n, out);
    case Activation::kGeluTanh:
      return gated_as<Activation::kGeluTanh>(gate, up, n, out);
    case Activation::kClampedSilu:
      return gated_as<Activation::kClampedSilu>(gate, up, n, out);
  }
  unknown("activation");
}

// Put the padded row x into its place, as it is.
void prepare_float(const float* x, int64_t m, const FloatActivations& out) {
  const Interleave to = interleave_of(m, out.n_tokens, out.n_padded(), 1);
  float* p = out.values + to.offset;
  for (int64_t k = 0; k < out.n_padded(); k++, p += to.step) *p = x[k];
}

// Four streams, as in the GEMV: on some machines one alone does not keep the memory busy.
uint32_t read(const void* data, int64_t nbytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  const int64_t stream = nbytes / 256 * 64;
  vi sums[kVectors] = {};
  auto take = [&](const uint8_t* line) {
    for (int v = 0; v < kVectors; v++) sums[v] ^= load_bits(line + v * kLanes * 4);
  };
  for (int64_t i = 0; i < stream; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      prefetch(p + j * stream + i + 1024);
      take(p + j * stream + i);
    }
  }
  for (int64_t i = 4 * stream; i < nbytes; i += 64) take(p + i);
  uint32_t out = 0;
  for (int v = 0; v < kVectors; v++) {
    for (int i = 0; i < kLanes; i++) out ^= static_cast<uint32_t>(sums[v][i]);
  }
  return out;
}
