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
}

// Place of token m in an interleaved buffer of `stride` elements a token, in units of `size`: where its first one lies, and
// how far each is behind the one before.
struct Place {
  int64_t offset, step;
};
inline Place place_of(int64_t m, int64_t n_tokens, int64_t stride, int64_t size) {
  const int64_t first = m / kTokenGroup * kTokenGroup;
  const int64_t left = n_tokens - first;
  return {first * stride + (m - first) * size, (left < kTokenGroup ? left : kTokenGroup) * size};
}

// The scale of values that become integers up to `top`, from the bits of the highest absolute value. One that would be
// subnormal is zero, as are the integers then; NaN where a value is NaN or infinite.
inline float scale_of(int32_t highest_bits, float top) {
  if (highest_bits >= 0x7F800000) return __builtin_nanf("");
  const float scale = __builtin_bit_cast(float, highest_bits) / top;
  return scale >= 0x1p-126f ? scale : 0.0f;
}
// Half to even, |x| < 2^22: the low bits of the sum hold the integer.
inline vi round_to_int(vf x) {
  const vf magic = splat(0x1.8p23f);
  return (vi)(x + magic) - (vi)magic;
}

// Quotients by one positive divisor, with the bits that division gives, where they are to be rounded to integers: the
// product with the reciprocal, corrected twice by what it leaves over (Markstein, Computation of elementary functions on the
// IBM RISC System/6000 processor, 1990). From kLeastByProduct on, what is left over does not underflow for quotients that do
// not round to zero anyway. Below, and where a fused multiply-add is no instruction, it is a division.
template <bool kByProduct>
struct Divisor {
  vf value, reciprocal;
  explicit Divisor(float x) : value(splat(x)), reciprocal(splat(1.0f / x)) {}
  vf operator()(vf x) const {
    if constexpr (!kByProduct) return x / value;
    vf q = x * reciprocal;
    q = fma(fma(-q, value, x), reciprocal, q);
    return fma(fma(-q, value, x), reciprocal, q);
  }
};
constexpr float kLeastByProduct = kFusedMultiplyAdd ? 0x1p-100f : __builtin_inff();

// The codes of a block, octets in the order of IntActivations (of digits low and high ones apart), and their sum.
struct Codes {
  alignas(64) int16_t words[kBlock];
  alignas(64) int8_t low[kBlock], high[kBlock];
  int32_t sum;
};
enum class Form { kPairs, kBytes, kDigits };

template <Form kForm, bool kByProduct>
void round_block(const float* x, int64_t n, float scale, Codes& out) {
  const Divisor<kByProduct> quotient(scale);
  vi sums = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vi code = round_to_int(quotient(load(x + i)));
    sums += code;
    if constexpr (kForm == Form::kPairs) {
      *reinterpret_cast<vh_unaligned*>(out.words + i) = __builtin_convertvector(code, vh);
    } else {
      *reinterpret_cast<vb_unaligned*>(out.low + i) = low_bytes(code);
      if constexpr (kForm == Form::kDigits) *reinterpret_cast<vb_unaligned*>(out.high + i) = low_bytes(code >> 8);
    }
  }
  out.sum = folded<kLanes / 2>(sums, [](vi a, vi b) { return a + b; })[0];
  if constexpr (kForm == Form::kPairs) {
    constexpr int kWords = 2 * kLanes;
    for (int64_t i = 0; i < n; i += kWords) {
      const vsu words = (vsu)load_bits(out.words + i);
      store_bits(out.words + i, (vi)shuffled(words, words, [](int j) { return j / 8 * 8 + j % 4 * 2 + j / 4 % 2; }));
    }
  }
}

template <Form kForm>
void prepare_int_as(const float* x, int64_t m, const IntActivations& out) {
  constexpr int kOctet = kForm == Form::kBytes ? 2 : 4;  // dwords
  const Place dwords = place_of(m, out.n_tokens, out.n_dwords(), kOctet);
  const Place blocks = place_of(m, out.n_tokens, out.n_blocks(), 1);
  uint32_t* p = out.dwords + dwords.offset;
  for (int64_t block = 0; block < out.n_blocks(); block++) {
    const int64_t column = block * out.block;
    const int64_t n = out.n_columns - column < out.block ? out.n_columns - column : out.block;
    vi top = {};
    const int64_t padded = pad_to(n, 16);  // rows are padded with zeros; blocks are whole multiples of 16 but for the last
    for (int64_t i = 0; i < padded; i += kLanes) {
      const vi bits = load_bits(x + column + i) & 0x7FFFFFFF;
      top = bits > top ? bits : top;
    }
    top = folded<kLanes / 2>(top, [](vi a, vi b) { return b > a ? b : a; });

    const float scale = scale_of(top[0], kForm == Form::kBytes ? 127.0f : 32767.0f);
    Codes codes;
    if (scale >= kLeastByProduct) {
      round_block<kForm, true>(x + column, padded, scale, codes);
    } else if (scale > 0) {
      round_block<kForm, false>(x + column, padded, scale, codes);
    } else {
      codes = {};
    }
    out.scales[blocks.offset + block * blocks.step] = scale;
    out.neg8_sums[blocks.offset + block * blocks.step] = -8 * codes.sum;
    for (int64_t i = 0; i < n; i += 8, p += dwords.step) {
      if constexpr (kForm == Form::kPairs) {
        __builtin_memcpy(p, codes.words + i, 16);
      } else if constexpr (kForm == Form::kBytes) {
        __builtin_memcpy(p, codes.low + i, 8);
      } else {
        __builtin_memcpy(p, codes.low + i, 4), __builtin_memcpy(p + 1, codes.high + i, 4);
        __builtin_memcpy(p + 2, codes.low + i + 4, 4), __builtin_memcpy(p + 3, codes.high + i + 4, 4);
      }
    }
  }
}

// a_scale = max|x| / 32767, or / 127, over a block; a = round_half_even(x / a_scale). A scale of NaN makes every product
// with the block NaN.
void prepare_int(const float* x, int64_t m, const IntActivations& out) {
  if (out.bits == 8) return prepare_int_as<Form::kBytes>(x, m, out);
  in_digits(out.bits, out.n_tokens) ? prepare_int_as<Form::kDigits>(x, m, out) : prepare_int_as<Form::kPairs>(x, m, out);
}

void prepare_float(const float* x, int64_t m, const FloatActivations& out) {
  const Place place = place_of(m, out.n_tokens, out.n_padded(), 1);
  float* p = out.values + place.offset;
  for (int64_t k = 0; k < out.n_padded(); k++, p += place.step) *p = x[k];
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
