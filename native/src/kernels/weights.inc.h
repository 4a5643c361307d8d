// What GEMV and GEMM make of the lines of a matrix: operands of integer dot products, or floats.

constexpr int64_t kPrefetchBlocks8 = 16;  // columns / 8 fetched ahead of those in use

// How activations lie in dwords, of 8 columns at a time:
// kPairs:   16 bits, as pairs (0,2) (4,6) (1,3) (5,7), the order in which masks and shifts bring out the nibbles of a line.
// kInOrder: 16 bits, as pairs (0,1) (2,3) (4,5) (6,7).
// kLowHigh: 16 bits, as two bytes, the low one unsigned and the high one signed: the low ones of columns 0 to 3, their high
//           ones, and the same of 4 to 7.
// kBytes:   8 bits, columns 0 to 3 and 4 to 7.
enum class Form : uint8_t { kPairs, kInOrder, kLowHigh, kBytes };
constexpr bool by_words(Entries entries) {
  return entries == Entries::kWords || (kAllByWords && entries == Entries::kBytes);
}
constexpr Form form_of(int bits, Entries entries, int64_t n_tokens) {
  if (bits == 8) return Form::kBytes;
  if (by_words(entries)) return kWordsInOrder ? Form::kInOrder : Form::kPairs;
  // Where dot_bytes takes any byte, codes of 4 bits need fewer masks and shifts so.
  return kWideBytes && n_tokens == 1 ? Form::kLowHigh : Form::kPairs;
}

// The scales, or the offsets, of the groups of a matrix.
struct Scales {
  const void* values;
  const uint16_t* supers;
  ScaleType type;
  int64_t n_groups, n_supers;
  int super_shift;  // from a group to its super-scale
  Shifts shifts;    // of kShifted
  static Scales of(const Matrix& w) {
    return {w.scales, w.super_scales, w.scale_type, w.n_groups(), w.n_supers(), shift_of(w), shifts_of(w.kind)};
  }
  static Scales of_offsets(const Matrix& w) {
    return {w.offsets, w.super_offsets, w.scale_type, w.n_groups(), w.n_supers(), shift_of(w), shifts_of(w.kind)};
  }
  // Of a vector of rows of a tile.
  vf lanes(int64_t tile, int64_t group, int64_t v) const {
    const int64_t index = (tile * n_groups + group) * 16 + v * kLanes;
    if (type == ScaleType::kF16) return from_f16(static_cast<const uint16_t*>(values) + index);
    if (type == ScaleType::kF32) return load(static_cast<const float*>(values) + index);
    const vf super = from_f16(supers + (tile * n_supers + (group >> super_shift)) * 16 + v * kLanes);
    vi bytes = from_bytes(static_cast<const int8_t*>(values) + index);
    if (type == ScaleType::kShifted) bytes = sub_scales_of(bytes);
    return super * __builtin_convertvector(bytes, vf);
  }
  // Minus the shifts, where the type is kShifted.
  vi zero_points(int64_t tile, int64_t group, int64_t v) const {
    const vi bytes = from_bytes(static_cast<const int8_t*>(values) + (tile * n_groups + group) * 16 + v * kLanes);
    return splat_int(-shifts.lowest) - shift_indices_of(bytes) * shifts.step;
  }
  // Of bytes of kShifted, in lanes: the 6 bits of the scale, and the 2 of the shift.
  static vi sub_scales_of(vi bytes) { return bytes << 26 >> 26; }
  static vi shift_indices_of(vi bytes) { return bytes >> 6 & 3; }

 private:
  static int shift_of(const Matrix& w) {
    if (w.scale_type == ScaleType::kShifted) return 32;
    return w.scale_type == ScaleType::kInt8 ? __builtin_ctzll(static_cast<uint64_t>(kSuperColumns / w.group_size)) : 0;
  }
};

inline vi zero_point_lanes(const uint8_t* p) {
  typedef uint8_t vub __attribute__((vector_size(kLanes)));
  typedef uint8_t vub_unaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector((vub) * reinterpret_cast<const vub_unaligned*>(p), vi);
}

// The pairs (0,2) (4,6) (1,3) (5,7) of a line of 4-bit codes, as int16 codes 0..15.
template <int kPair>
inline vi nibble_pair(vi line) {
  constexpr int kShift = 4 * kPair;
  if constexpr (kPair == 3) return (vi)((vsu)line >> kShift);
  return (vi)(((vu)line >> kShift) & 0x000F000Fu);
}
// The columns 0..3 or 4..7 of a line of 4-bit codes, as bytes.
template <int kHalf>
inline vi nibble_bytes(vi line) {
  constexpr int kShift = 4 * kHalf;
  return (vi)(((vu)line >> kShift) & 0x0F0F0F0Fu);
}
// The pairs (0,2) (1,3) of a dword of signed bytes, sign-extended to int16.
template <int kPair>
inline vi byte_pair(vi line) {
  const vs words = (vs)line;
  return kPair == 0 ? (vi)((vs)(words << 8) >> 8) : (vi)(words >> 8);
}
// What the inner loops of integers tell apart: unsigned codes of 4 bits less a zero point, codes of 4 or 3 bits that stand
// for the signed bytes or the int16 of a codebook, and signed bytes. All else that kinds differ in is asked once a block
// (IntWeights).
enum class Codes : uint8_t { kNibbles, kByteLevels, kWordLevels, kThreeByteLevels, kThreeWordLevels, kBytes };
constexpr bool are_of_three(Codes codes) { return codes == Codes::kThreeByteLevels || codes == Codes::kThreeWordLevels; }
// What they are once a line holds 8 columns.
constexpr Codes of_whole_lines(Codes codes) {
  return codes == Codes::kThreeByteLevels   ? Codes::kByteLevels
         : codes == Codes::kThreeWordLevels ? Codes::kWordLevels
                                            : codes;
}
// Of codes of 3 bits: the fourth dword of 32 columns, by the three that there are. Its own fourth bits are 0, those of the
// others are not.
template <class Dword>
inline Dword last_of_four(Dword a, Dword b, Dword c) {
  return (a >> 3 & 0x11111111u) | (b >> 2 & 0x22222222u) | (c >> 1 & 0x44444444u);
}
// Where a block8 begins in the lines of a tile, and a vector of rows of it. Of codes of 3 bits the fourth of four begins
// where the first does.
template <Codes kCodes>
constexpr int64_t line_of(int64_t block8) {
  if constexpr (are_of_three(kCodes)) return block8 / 4 * 3 + (block8 % 4 < 3 ? block8 % 4 : 0);
  return kCodes == Codes::kBytes ? 2 * block8 : block8;
}
template <Codes kCodes>
inline vi load_line(const uint32_t* line, int64_t block8) {
  if constexpr (are_of_three(kCodes)) {
    if (block8 % 4 == 3) {
      return (vi)last_of_four((vu)load_bits(line), (vu)load_bits(line + 16), (vu)load_bits(line + 32));
    }
  }
  return load_bits(line);
}
constexpr bool are_signed_bytes(Codes codes) { return codes == Codes::kByteLevels || codes == Codes::kBytes; }
// Where dot_bytes takes any byte, signed weights w enter it as w + 128.
constexpr bool biased(Codes codes) { return kWideBytes && are_signed_bytes(codes); }

// An integer matrix, as the loops over its blocks see it.
struct IntWeights {
  Scales scales, offsets;
  const uint8_t* zero_points;  // [tile][n_groups][16], or null: all are zero_point
  int zero_point;
  const WholeLevels& codebook;  // where they are looked up
  bool has_offsets;

  explicit IntWeights(const Matrix& w)
      : scales(Scales::of(w)),
        offsets(Scales::of_offsets(w)),
        zero_points(w.kind == Kind::kInt4z ? w.zero_points : nullptr),
        zero_point(w.kind == Kind::kInt4 ? 8 : 0),
        codebook(whole_levels_of(w.kind)),
        has_offsets(w4conv::has_offsets(w.kind)) {}

  // Of a vector of rows.
  vi zero_point_at(int64_t tile, int64_t group, int64_t v) const {
    if (scales.type == ScaleType::kShifted) return scales.zero_points(tile, group, v);
    if (zero_points == nullptr) return splat_int(zero_point);
    return zero_point_lanes(zero_points + (tile * scales.n_groups + group) * 16 + v * kLanes);
  }
};

// The levels of a codebook, ready for Codes of it; nothing for others. biased: bytes w as w + 128.
template <Codes kCodes>
struct Table {
  explicit Table(const WholeLevels&, bool = false) {}
};
template <>
struct Table<Codes::kByteLevels> : ByteLevels {
  explicit Table(const WholeLevels& x, bool biased = false) : ByteLevels(x.levels, biased) {}
};
template <>
struct Table<Codes::kWordLevels> : WordLevels {
  explicit Table(const WholeLevels& x, bool = false) : WordLevels(x.levels) {}
};

// Column c of a float line.
template <Kind kKind, int kColumn>
inline vf float_column(vi line) {
  if constexpr (kKind == Kind::kF32) return (vf)line;
  if constexpr (kKind == Kind::kBf16) return (vf)(kColumn == 0 ? (vu)line << 16 : (vu)line & 0xFFFF0000u);
  if constexpr (kKind == Kind::kF16) return f16_lanes(kColumn == 0 ? (vu)line & 0xFFFFu : (vu)line >> 16);
}

// Eight columns with activations of 8 bits.
template <Codes kCodes>
inline vi eight_products(vi acc, vi w0, vi a0, vi w1, vi a1) {
  if constexpr (are_signed_bytes(kCodes) && !kWideBytes) {
    acc = dot(dot(acc, byte_pair<0>(w0), byte_pair<0>(a0)), byte_pair<1>(w0), byte_pair<1>(a0));
    return dot(dot(acc, byte_pair<0>(w1), byte_pair<0>(a1)), byte_pair<1>(w1), byte_pair<1>(a1));
  }
  return dot_bytes(acc, w0, a0, w1, a1);
}

// What is to be taken off a block's sum: zero point times the sum of the activations, and the bias of signed bytes.
template <Codes kCodes, int kBits>
inline vi start_of_sum(int32_t neg8_sum, vi zero_points) {
  const vi bias = splat_int(kBits == 8 && biased(kCodes) ? 16 * neg8_sum : 0);
  return kCodes == Codes::kBytes ? bias : bias + (zero_points * neg8_sum >> 3);
}

// What the offsets of a block's weights are multiplied with, next to the block's scale.
inline vf sum_of_activations(int32_t neg8_sum) { return splat(static_cast<float>(-(neg8_sum / 8))); }
