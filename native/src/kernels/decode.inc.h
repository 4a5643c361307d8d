// GEMV of one token, as integers: decoding. kStreams tiles take a block of columns in turn, and are as many streams that
// keep memory busy; kStreamsAtOnce of them have their sums in registers.

// Columns / 8 fetched ahead of those in use into the first cache, and into the second one. (The first has room for few
// lines on their way: docs/decisions/0024-levels-as-integers.md.)
constexpr int64_t kNear = 4, kFar = 16;
// Bytes of scales fetched ahead.
constexpr int64_t kScalesAhead = 128;

// What a line of a vector of rows does to the two sums p and q of a block.
template <Codes kCodes, int kBits>
struct LineSum {
  static constexpr int kDwords = kBits / 4, kLines = kCodes == Codes::kBytes ? 2 : 1;  // of 8 columns
  static constexpr bool kLowHigh = kBits == 16 && kWideBytes && kCodes != Codes::kWordLevels;
  // Bytes become words, without sign, as w + 128: that takes less.
  static constexpr bool kWidened = kBits == 16 && !kLowHigh && are_signed_bytes(kCodes);
  static constexpr bool kBiasedTable = kWidened || (kBits == 8 && biased(kCodes));

  [[gnu::always_inline]] static vi start(int32_t neg8_sum, vi zero_points) {
    return kWidened ? splat_int(16 * neg8_sum) : start_of_sum<kCodes, kBits>(neg8_sum, zero_points);
  }
  // x: the line, of bytes the first one; next: from there to the second one. (Sums are kept, or GCC adds products to one
  // another before it adds them to a sum, for which there are too few registers.)
  [[gnu::always_inline]] static void add(vi x, const uint32_t* line, int64_t next, const int32_t* a,
                                         const Table<kCodes>& table, vi& p, vi& q) {
    vi y = {};
    keep(x);
    if constexpr (kCodes == Codes::kBytes) {
      y = load_bits(line + next);
      keep(y);
    }
    if constexpr (kCodes == Codes::kWordLevels) {
      table.add(x, a, p, q);
    } else if constexpr (kCodes == Codes::kNibbles && kBits == 16 && !kLowHigh) {
      // What meets odd dwords stays where it is in its bytes, 16 times as large as it should be.
      p = dot(p, x & 0x000F000F, splat_int(a[0])), q = dot(q, x & 0x00F000F0, splat_int(a[1]));
      keep(p), keep(q);
      x = (vi)((vu)x >> 8);
      p = dot(p, x & 0x000F000F, splat_int(a[2])), q = dot(q, x & 0x00F000F0, splat_int(a[3]));
    } else {
      if constexpr (kCodes != Codes::kBytes) y = nibble_bytes<1>(x), x = nibble_bytes<0>(x);
      if constexpr (kCodes == Codes::kByteLevels) x = table.of(x), y = table.of(y);
      add_bytes(x, y, a, p, q);
    }
    keep(p), keep(q);
  }
  // high: 128 times the sum of the activations' high bytes.
  [[gnu::always_inline]] static vi total(vi p, vi q, vi high) {
    if constexpr (kCodes == Codes::kWordLevels) return Table<kCodes>::total(p, q);
    if constexpr (kBits == 8 || kWidened) return p;
    if constexpr (kLowHigh) return p + ((q - high) << 8);
    return p + (q >> 4);
  }

 private:
  // Columns 0..3 and 4..7 as bytes.
  [[gnu::always_inline]] static void add_bytes(vi x, vi y, const int32_t* a, vi& p, vi& q) {
    constexpr bool kFlips = (biased(kCodes) || kWidened) && !(kCodes == Codes::kByteLevels && kBiasedTable);
    const vi flip = splat_int(kFlips ? static_cast<int32_t>(0x80808080u) : 0);
    if constexpr (kBits == 8) {
      p = eight_products<kCodes>(p, x ^ flip, splat_int(a[0]), y ^ flip, splat_int(a[1]));
    } else if constexpr (kLowHigh) {  // the unsigned side is the activations, then the weights
      p = dot_bytes(p, splat_int(a[0]), x, splat_int(a[2]), y);
      q = dot_bytes(q, x ^ flip, splat_int(a[1]), y ^ flip, splat_int(a[3]));
    } else {
      x ^= flip, y ^= flip;
      p = dot(p, x & 0x00FF00FF, splat_int(a[0]));
      keep(p);
      p = dot(p, y & 0x00FF00FF, splat_int(a[1]));
      keep(p);
      p = dot(p, (vi)((vsu)x >> 8), splat_int(a[2]));
      keep(p);
      p = dot(p, (vi)((vsu)y >> 8), splat_int(a[3]));
    }
  }
};

// Where w enters as w + 128: 128 times the sum of the high bytes of a block's activations.
inline vi sum_of_high_bytes(const int32_t* a, int64_t n_blocks8) {
  const vi all = splat_int(static_cast<int32_t>(0x80808080u));
  vi sum = {};
  for (int64_t i = 0; i < n_blocks8; i++, a += 4) sum = dot_bytes(sum, all, splat_int(a[1]), all, splat_int(a[3]));
  return sum;
}

// What a block does besides its products is known here for symmetric integers and codebooks with scales of FP16, of two
// levels, or with shifts; all else is asked.
enum class Scaling : uint8_t { kF16, kInt8, kShifted, kAny };
inline Scaling scaling_of(const Matrix& w) {
  if (w.kind == Kind::kInt4z || has_offsets(w.kind) || w.scale_type == ScaleType::kF32) return Scaling::kAny;
  if (w.scale_type == ScaleType::kShifted) return Scaling::kShifted;
  return w.scale_type == ScaleType::kF16 ? Scaling::kF16 : Scaling::kInt8;
}

// A tile as a stream: its lines, and its sub-scales or, if it has no others, scales. (Kept as pointers, or their places are
// computed again for each block.)
struct Stream {
  int64_t tile;
  const uint32_t* lines;
  const char* scales;
  float* sums;    // [16]
  float* supers;  // [16], of the groups of two levels that share them
};

// Up to kStreams tiles; where there are fewer, the last one is taken again.
template <Codes kStored, int kBits, Scaling kScaling>
void int_decode(const Matrix& w, const IntActivations& x, float* y, int64_t tile, int64_t n_tiles, float* scratch) {
  constexpr Codes kCodes = of_whole_lines(kStored);
  using Sum = LineSum<kCodes, kBits>;
  constexpr int kV = kStreamsAtOnce * kVectors, kLines = Sum::kLines;
  constexpr int64_t kScaleNbytes = kScaling == Scaling::kF16 ? 2 : 1;
  constexpr int64_t kNearLines = line_of<kStored>(kNear) * 16, kFarLines = line_of<kStored>(kFar) * 16;
  constexpr bool kTwoLevels = kScaling == Scaling::kInt8 || kScaling == Scaling::kShifted;
  const int64_t n_blocks = x.n_blocks(), n_lines = w.n_lines();
  const int64_t blocks_a_group = (w.group_size + x.block - 1) / x.block;
  const int64_t n_blocks8 = (w.n_columns + 7) / 8, blocks8_a_block = (x.block + 7) / 8;
  const IntWeights weights(w);
  const Table<kCodes> table(weights.codebook, Sum::kBiasedTable);
  const Scales& scales = weights.scales;
  Stream streams[kStreams];
  for (int j = 0; j < kStreams; j++) {
    Stream& s = streams[j];
    s.tile = tile + (j < n_tiles ? j : n_tiles - 1);
    s.lines = w.lines + s.tile * n_lines * 16;
    s.scales = static_cast<const char*>(scales.values) + s.tile * scales.n_groups * kTileRows * kScaleNbytes;
    s.sums = scratch + j * kTileRows, s.supers = scratch + (kStreams + j) * kTileRows;
    for (int v = 0; v < kVectors; v++) store(s.sums + v * kLanes, vf{});
  }
  const auto* a = reinterpret_cast<const int32_t*>(x.dwords);
  for (int64_t block = 0, group = 0, in_group = 0; block < n_blocks; block++) {
    const int64_t begin = block * blocks8_a_block;
    const int64_t end = begin + blocks8_a_block < n_blocks8 ? begin + blocks8_a_block : n_blocks8;
    const int64_t first = are_of_three(kStored) ? begin / 4 * 4 : begin;  // of those that share lines with it
    // A second line that is not there has only zeros for activations: the first one does as well.
    const int64_t n_whole = end - begin - (kLines == 2 && end * 2 > n_lines ? 1 : 0);
    const int32_t neg8_sum = x.neg8_sums[block];
    const vf a_scale = splat(x.scales[block]);
    const vi lowest_shift = splat_int(scales.shifts.lowest * (-neg8_sum / 8));  // each times the sum of the activations
    const vi shift_step = splat_int(scales.shifts.step * (-neg8_sum / 8));
    vi high = {};
    if constexpr (Sum::kLowHigh && biased(kCodes)) high = sum_of_high_bytes(a, end - begin);
    if (kTwoLevels && in_group == 0 && (group & ((int64_t{1} << scales.super_shift) - 1)) == 0) {
      for (const Stream& s : streams) {
        const uint16_t* const from = scales.supers + (s.tile * scales.n_supers + (group >> scales.super_shift)) * 16;
        for (int v = 0; v < kVectors; v++) store(s.supers + v * kLanes, from_f16(from + v * kLanes));
        prefetch(from + kScalesAhead);
      }
    }
    for (int some = 0; some < kStreams; some += kStreamsAtOnce) {
      const Stream* const now = streams + some;
      const uint32_t* lines[kStreamsAtOnce];
      vi p[kV], q[kV];
#pragma GCC unroll 4
      for (int j = 0; j < kStreamsAtOnce; j++) {
        lines[j] = now[j].lines + line_of<kStored>(first) * 16;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          vi zero_points = splat_int(kCodes == Codes::kNibbles ? 8 : 0);
          if constexpr (kCodes == Codes::kNibbles && kScaling == Scaling::kAny) {
            zero_points = weights.zero_point_at(now[j].tile, group, v);
          }
          p[j * kVectors + v] = Sum::start(neg8_sum, zero_points), q[j * kVectors + v] = vi{};
        }
      }
      // The 8 columns i of the block, which lie `place` behind four times 8 columns from the first of `lines` on. near, far:
      // how far ahead of it what is fetched lies.
      const auto add = [&](int64_t i, int64_t fours, int64_t place, int64_t next, int64_t near,
                           int64_t far) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int j = 0; j < kStreamsAtOnce; j++) {
          const uint32_t* const line = lines[j] + (fours * line_of<kStored>(4) + line_of<kStored>(place)) * 16;
          if (!are_of_three(kStored) || place % 4 < 3) {
#pragma GCC unroll 4
            for (int l = 0; l < kLines; l++) prefetch(line + near + l * 16), prefetch_far(line + far + l * 16);
          }
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++) {
            const uint32_t* const from = line + v * kLanes;
            Sum::add(load_line<kStored>(from, place), from, next, a + i * Sum::kDwords, table, p[j * kVectors + v],
                     q[j * kVectors + v]);
          }
        }
      };
      int64_t i = 0;
      for (; i + 4 <= n_whole; i += 4) {
        // At the end of these tiles, what comes next is the tiles behind the last one.
        const int64_t left = n_blocks8 - begin - i - 4, behind = (kStreams - 1) * n_lines;
        const int64_t near = kNearLines + (left < kNear ? behind : 0) * 16;
        const int64_t far = kFarLines + (left < kFar ? behind : 0) * 16;
        const int64_t fours = i / 4;
        add(i, fours, 0, 16, near, far), add(i + 1, fours, 1, 16, near, far);
        add(i + 2, fours, 2, 16, near, far), add(i + 3, fours, 3, 16, near, far);
      }
      for (; i < n_whole; i++) add(i, 0, begin - first + i, 16, kNearLines, kFarLines);
      if (i < end - begin) add(i, 0, begin - first + i, 0, kNearLines, kFarLines);
#pragma GCC unroll 4
      for (int j = 0; j < kStreamsAtOnce; j++) {
        const Stream& s = now[j];
        if constexpr (kScaling != Scaling::kAny) prefetch(s.scales + group * kTileRows * kScaleNbytes + kScalesAhead);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          const int64_t at = group * kTileRows + v * kLanes;
          vi total = Sum::total(p[j * kVectors + v], q[j * kVectors + v], high);
          vf w_scale;
          if constexpr (kScaling == Scaling::kF16) w_scale = from_f16(reinterpret_cast<const uint16_t*>(s.scales) + at);
          if constexpr (kTwoLevels) {
            vi bytes = from_bytes(reinterpret_cast<const int8_t*>(s.scales) + at);
            if constexpr (kScaling == Scaling::kShifted) {
              total += lowest_shift + Scales::shift_indices_of(bytes) * shift_step;
              bytes = Scales::sub_scales_of(bytes);
            }
            w_scale = load(s.supers + v * kLanes) * __builtin_convertvector(bytes, vf);
          }
          if constexpr (kScaling == Scaling::kAny) w_scale = scales.lanes(s.tile, group, v);
          vf sum = load(s.sums + v * kLanes) + __builtin_convertvector(total, vf) * (w_scale * a_scale);
          if (kScaling == Scaling::kAny && weights.has_offsets) {
            sum += sum_of_activations(neg8_sum) * (weights.offsets.lanes(s.tile, group, v) * a_scale);
          }
          store(s.sums + v * kLanes, sum);
        }
      }
    }
    a += (end - begin) * Sum::kDwords;
    if (++in_group == blocks_a_group) group++, in_group = 0;
  }
  for (int64_t i = 0; i < n_tiles * kVectors; i++) store(y + tile * kTileRows + i * kLanes, load(scratch + i * kLanes));
}

template <Codes kStored, int kBits>
void int_decode_tiles(const Matrix& w, const IntActivations& x, float* y, int64_t tile, int64_t tile_end, float* scratch) {
  const Scaling scaling = scaling_of(w);
  constexpr Codes kCodes = of_whole_lines(kStored);
  constexpr bool kHasShifts = kCodes == Codes::kByteLevels || kCodes == Codes::kWordLevels;
  auto decode = int_decode < kStored, kBits, kHasShifts ? Scaling::kShifted : Scaling::kAny > ;
  if constexpr (!are_of_three(kStored)) {  // which have no other scales
    if (scaling == Scaling::kAny) decode = int_decode<kStored, kBits, Scaling::kAny>;
    if (scaling == Scaling::kF16) decode = int_decode<kStored, kBits, Scaling::kF16>;
    if (scaling == Scaling::kInt8) decode = int_decode<kStored, kBits, Scaling::kInt8>;
  }
  for (; tile < tile_end; tile += kStreams) {
    decode(w, x, y, tile, tile_end - tile < kStreams ? tile_end - tile : kStreams, scratch);
  }
}
