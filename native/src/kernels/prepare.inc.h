// Activations of integer GEMMs: rows of float32 become codes with a scale a block, interleaved by tokens (docs/numerics.md
// 2).

// Where token m lies in an interleaved buffer of `stride` elements a token, in units of `size`: where its first one lies,
// and how far each is behind the one before.
struct Interleave {
  int64_t offset, step;
};
inline Interleave interleave_of(int64_t m, int64_t n_tokens, int64_t stride, int64_t size) {
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

// The codes of a block in the order of IntActivations, or their low and high bytes apart, and their sum.
struct BlockCodes {
  alignas(64) int16_t words[kBlock];
  alignas(64) int8_t low[kBlock], high[kBlock];
  int32_t sum;
};

template <Form kForm, bool kByProduct>
void round_block(const float* x, int64_t n, float scale, BlockCodes& out) {
  const Divisor<kByProduct> quotient(scale);
  vi sums = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vi code = round_to_int(quotient(load(x + i)));
    sums += code;
    if constexpr (kForm == Form::kPairs || kForm == Form::kInOrder) {
      *reinterpret_cast<vh_unaligned*>(out.words + i) = __builtin_convertvector(code, vh);
    } else {
      *reinterpret_cast<vb_unaligned*>(out.low + i) = low_bytes(code);
      if constexpr (kForm == Form::kLowHigh) *reinterpret_cast<vb_unaligned*>(out.high + i) = low_bytes(code >> 8);
    }
  }
  out.sum = reduce_lanes<kLanes / 2>(sums, [](vi a, vi b) { return a + b; })[0];
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
  constexpr int kBlock8 = kForm == Form::kBytes ? 2 : 4;  // dwords
  const Interleave dwords = interleave_of(m, out.n_tokens, out.n_dwords(), kBlock8);
  const Interleave blocks = interleave_of(m, out.n_tokens, out.n_blocks(), 1);
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
    top = reduce_lanes<kLanes / 2>(top, [](vi a, vi b) { return b > a ? b : a; });

    const float scale = scale_of(top[0], kForm == Form::kBytes ? 127.0f : 32767.0f);
    BlockCodes codes;
    if (scale >= kLeastByProduct) {
      round_block<kForm, true>(x + column, padded, scale, codes);
    } else if (scale > 0) {
      round_block<kForm, false>(x + column, padded, scale, codes);
    } else {
      codes = {};
    }
    out.scales[blocks.offset + block * blocks.step] = scale * out.factor;
    out.neg8_sums[blocks.offset + block * blocks.step] = -8 * codes.sum;
    for (int64_t i = 0; i < n; i += 8, p += dwords.step) {
      if constexpr (kForm == Form::kPairs || kForm == Form::kInOrder) {
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
  switch (form_of(out.bits, out.entries, out.n_tokens)) {
    case Form::kPairs:
      return prepare_int_as<Form::kPairs>(x, m, out);
    case Form::kInOrder:
      return prepare_int_as<Form::kInOrder>(x, m, out);
    case Form::kLowHigh:
      return prepare_int_as<Form::kLowHigh>(x, m, out);
    case Form::kBytes:
      return prepare_int_as<Form::kBytes>(x, m, out);
  }
}
