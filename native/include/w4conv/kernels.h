// Kernels: one table of function pointers a tier; every tier computes the same bits (docs/numerics.md).
//
// Shapes: M tokens x N rows x K columns. A weight matrix is stored in tiles of 16 rows (formats/w4-codes.md):
//   line  = 16 dwords, one a row;  tile = consecutive lines;  scales [tile][group][16].
// Rows of float buffers ("padded rows") are multiples of 16 floats long; what lies past their end is zero.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace w4conv {

constexpr int kTileRows = 16;
constexpr int kBlock = 128;                   // columns that share an activation scale, at most
constexpr int kWordsBlock = 32;               // the same, where levels are wider than a byte
constexpr int kTokenGroup = 12;               // tokens interleaved for the GEMM
constexpr int kMaxTokens = 10 * kTokenGroup;  // tokens that a GEMM takes through a block of weights at a time
constexpr int kGemmTiles = 4;                 // tiles whose block of columns a GEMM unpacks together
constexpr int kKeyTile = 16;                  // keys stored together in the K cache
constexpr int kSplitKeys = 256;               // keys at fixed positions whose softmax is made by itself (numerics.md 5)
constexpr int kKeyStep = 64;                  // keys whose scores a kernel may form together
constexpr int kChunkRows = 4 * kTileRows;     // rows of a matrix that are rounded side by side
constexpr int kPanel = 48;                    // columns of a matrix of floats packed together for a GEMM
constexpr int kFactorBlock = 2 * kPanel;      // rows of a factor made together
constexpr int kPeakBlock = 64;                // logits whose largest is found together
constexpr double kWholeWeight = 0x1p40;       // a sampler's weight of 1, as a whole number

constexpr int64_t pad_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Raises std::logic_error: a switch does not know the value, a defect.
[[noreturn]] void unknown(const char* what);

enum class Kind : uint8_t { kInt4, kInt4z, kInt4o, kE2m1, kIq4nl, kNl4, kNl3, kNf4, kFp4, kInt8, kInt8o, kF16, kBf16, kF32 };
constexpr bool is_float(Kind kind) { return kind >= Kind::kF16; }
constexpr bool is_codebook(Kind kind) { return kind >= Kind::kE2m1 && kind <= Kind::kFp4; }
constexpr bool is_int8(Kind kind) { return kind == Kind::kInt8 || kind == Kind::kInt8o; }
constexpr bool has_offsets(Kind kind) { return kind == Kind::kInt4o || kind == Kind::kInt8o; }
// Whether codes have 3 bits: 24 of 32 columns lie as those of 4 bits do, in three lines, and bit j of the 8 others in the
// fourth bits of line j.
constexpr bool is_of_three(Kind kind) { return kind == Kind::kNl3; }
// Of those of 3 bits, the columns of a dword are those that lie in it as a whole.
constexpr int columns_per_dword(Kind kind) {
  return kind < Kind::kInt8 ? 8 : is_int8(kind) ? 4 : kind == Kind::kF32 ? 1 : 2;
}
[[gnu::always_inline]] constexpr int64_t n_lines_of(Kind kind, int64_t n_columns) {
  if (is_of_three(kind)) return (n_columns + 31) / 32 * 3;
  return (n_columns + columns_per_dword(kind) - 1) / columns_per_dword(kind);
}
// The code that stands in padding columns (w4-codes 3.5).
constexpr int zero_code(Kind kind) { return kind == Kind::kInt4 || kind == Kind::kInt4z ? 8 : kind == Kind::kNf4 ? 7 : 0; }

// w4-codes 2.3
constexpr float kNf4Levels[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
constexpr float kFp4Levels[16] = {0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
                                  -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
constexpr float kE2m1Levels[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr float kIq4nlLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice: the fourth bit of a code of 3 bits may be anything.
constexpr float kNl3Levels[16] = {-127, -72, -40, -13, 11, 34, 64, 103, -127, -72, -40, -13, 11, 34, 64, 103};
constexpr const float* levels_of(Kind kind) {
  return kind == Kind::kNf4    ? kNf4Levels
         : kind == Kind::kNl3  ? kNl3Levels
         : kind == Kind::kFp4  ? kFp4Levels
         : kind == Kind::kE2m1 ? kE2m1Levels
                               : kIq4nlLevels;
}

// The levels of a codebook as the integers of products (docs/numerics.md 2), and what they are times as a level.
struct WholeLevels {
  int16_t levels[16];
  float factor;
};
constexpr WholeLevels kWholeNf4 = {
    {-2048, -1426, -1075, -809, -583, -378, -186, 0, 163, 330, 504, 692, 903, 1152, 1481, 2048}, 0x1p-11f};
constexpr WholeLevels kWholeFp4 = {{0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48}, 1.0f / 192};
constexpr WholeLevels kWholeE2m1 = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 0.5f};
constexpr WholeLevels kWholeIq4nl = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f};
constexpr WholeLevels kWholeNl3 = {{-127, -72, -40, -13, 11, 34, 64, 103, -127, -72, -40, -13, 11, 34, 64, 103}, 1.0f};
constexpr const WholeLevels& whole_levels_of(Kind kind) {
  return kind == Kind::kNf4    ? kWholeNf4
         : kind == Kind::kFp4  ? kWholeFp4
         : kind == Kind::kE2m1 ? kWholeE2m1
         : kind == Kind::kNl3  ? kWholeNl3
                               : kWholeIq4nl;
}
// What a code stands for in products: itself, less a zero point or as a signed byte; or an entry of a codebook that is a
// signed byte, or wider.
enum class Entries : uint8_t { kNone, kBytes, kWords };
constexpr float factor_of(Kind kind) { return is_codebook(kind) ? whole_levels_of(kind).factor : 1.0f; }
constexpr Entries entries_of(Kind kind) {
  return !is_codebook(kind) ? Entries::kNone : kind < Kind::kNf4 ? Entries::kBytes : Entries::kWords;
}

// Of the scales and offsets of groups. kInt8: a signed byte, times an FP16 number for every kSuperColumns columns. kShifted:
// a byte with a signed scale of 6 bits, times an FP16 number for the whole row, and above it 2 bits i of the group's shift:
// lowest + i * step is added to the levels (w4-codes 2.6).
enum class ScaleType : uint8_t { kF16, kF32, kInt8, kShifted };
constexpr int64_t kSuperColumns = 256;
struct Shifts {
  int lowest, step;
};
constexpr Shifts shifts_of(Kind kind) { return kind == Kind::kNl3 ? Shifts{-18, 12} : Shifts{-12, 8}; }

struct Matrix {
  Kind kind = Kind::kF32;
  int64_t n_rows = 0, n_columns = 0;
  int64_t group_size = 0;                // columns that share a weight scale; n_columns for whole rows; 0 for floats
  const uint32_t* lines = nullptr;       // [tile][n_lines][16]
  const void* scales = nullptr;          // [tile][n_groups][16] of scale_type; null for floats
  const uint8_t* zero_points = nullptr;  // [tile][n_groups][16], of kInt4z
  const void* offsets = nullptr;         // of the same type as scales, where has_offsets
  ScaleType scale_type = ScaleType::kF16;
  const uint16_t *super_scales = nullptr, *super_offsets = nullptr;  // [tile][n_supers][16] FP16, of kInt8 and kShifted

  int64_t n_tiles() const { return (n_rows + kTileRows - 1) / kTileRows; }
  int rows_of(int64_t tile) const {
    return static_cast<int>(n_rows - tile * kTileRows < kTileRows ? n_rows - tile * kTileRows : kTileRows);
  }
  int64_t n_lines() const { return n_lines_of(kind, n_columns); }
  int64_t n_groups() const { return is_float(kind) ? 0 : (n_columns + group_size - 1) / group_size; }
  int64_t n_supers() const {
    if (scale_type == ScaleType::kShifted) return 1;
    return scale_type == ScaleType::kInt8 ? (n_columns + kSuperColumns - 1) / kSuperColumns : 0;
  }
  // Columns of an activation block: the weight group, or where that is smaller the most that 32 bits can sum.
  int64_t block() const {
    const int64_t most = entries_of(kind) == Entries::kWords ? kWordsBlock : kBlock;
    return group_size < most ? group_size : most;
  }
};

// M activation rows made ready for a GEMM. Tokens are interleaved in groups of kTokenGroup (the last group holds what
// is left): unit p of token t of group g lies at g * kTokenGroup * stride + (p * tokens_in_group + t) * size of a unit.
//
// Integer form: codes of 16 or 8 bits, in dwords; a unit is an block8, the 8 columns k... In which order they lie in it is
// for the tier to say, by bits, entries and tokens (form_of in weights.inc.h).
struct IntActivations {
  int64_t n_tokens = 0, n_columns = 0, block = 0;
  int bits = 16;
  Entries entries = Entries::kNone;  // of the codes that they meet
  float factor = 1;                  // of their scales, as those codes' levels have it
  uint32_t* dwords = nullptr;        // stride: n_dwords()
  float* scales = nullptr;           // times factor; stride: n_blocks()
  int32_t* neg8_sums = nullptr;      // -8 * sum of a block's codes; stride: n_blocks()
  int64_t n_dwords() const { return pad_to(n_columns, 8) * bits / 32; }
  int64_t n_blocks() const { return (n_columns + block - 1) / block; }
};
// Float form: the float32 values themselves, a unit each; stride = n_padded(), zeros past n_columns.
struct FloatActivations {
  int64_t n_tokens = 0, n_columns = 0;
  float* values = nullptr;
  int64_t n_padded() const { return pad_to(n_columns, 8); }
};

enum class KvKind : uint8_t { kF16, kF32, kInt8 };
constexpr int64_t kv_nbytes(KvKind kind) { return kind == KvKind::kF32 ? 4 : kind == KvKind::kF16 ? 2 : 1; }

// One layer's keys and values, by blocks of kSplitKeys slots, so that memory fills from one end: keys
// [block][kv_head][slot tile][head_dim][16], values [block][kv_head][tile of dimensions][slot of the block][16]; of kInt8
// also a scale for each key and each value, [block][kv_head][slot of the block]. With a window a query sees the newest
// `window` positions, and the first n_sink_keys ones. Slots behind the sink ones are a ring then: a token takes the slot of
// one that no query sees any more.
struct KvCache {
  int64_t n_kv_heads = 0, head_dim = 0;
  KvKind kind = KvKind::kF16;
  int64_t n_slots = 0;                  // a multiple of kSplitKeys
  int64_t window = 0, n_sink_keys = 0;  // window 0: all are seen; n_sink_keys: 0 or kKeyTile
  void *keys = nullptr, *values = nullptr;
  float *key_scales = nullptr, *value_scales = nullptr;

  int64_t value_stride() const { return pad_to(head_dim, 16); }
  // Where a slot's key begins, its dimensions kKeyTile apart; its value, 16 dimensions together and kSplitKeys * 16 apart;
  // and its scales.
  int64_t key_at(int64_t kv_head, int64_t slot) const {
    return (scale_at(kv_head, slot) - slot % kKeyTile) * head_dim + slot % kKeyTile;
  }
  int64_t value_at(int64_t kv_head, int64_t slot) const {
    return (scale_at(kv_head, slot) - slot % kSplitKeys) * value_stride() + slot % kSplitKeys * 16;
  }
  int64_t scale_at(int64_t kv_head, int64_t slot) const {
    return (slot / kSplitKeys * n_kv_heads + kv_head) * kSplitKeys + slot % kSplitKeys;
  }
  int64_t slot(int64_t position) const {
    return position < n_slots ? position : n_sink_keys + (position - n_sink_keys) % (n_slots - n_sink_keys);
  }
  // The first position behind the sink ones that a query at `position` sees.
  int64_t first(int64_t position) const {
    return window > 0 && position - window + 1 > n_sink_keys ? position - window + 1 : n_sink_keys;
  }
};

// How the scores of one layer become weights: scale times q.k, then cap * tanh(score / cap) where cap > 0. sinks: a logit
// for each query head that joins the softmax and carries no value; or null.
// cos_sin: of RoPE, where keys are stored without their bias: times Queries::bias_terms it is what the bias adds to q.k
// (Rope::bias_terms), [position tile][n_bias_terms][16]; or null.
struct AttentionRule {
  float scale = 1, softcap = 0;
  const float* sinks = nullptr;
  const float* cos_sin = nullptr;
  int64_t n_bias_terms = 0;
};

// The query heads of one KV head, of consecutive tokens. Row r is head r % n_group of the token at position + r / n_group;
// its dimension i lies at values[i * n_rows + r], and so does bias_terms[i * n_rows + r] (see AttentionRule).
struct Queries {
  const float* values = nullptr;
  const float* bias_terms = nullptr;
  int64_t n_rows = 0, n_group = 0, position = 0;
};
// Sums over one KV split (flash decoding), for each row of queries; rows that see none of its keys have the sum 0.
struct SplitSums {
  float* values;  // [n_rows][value_stride]: values weighted by exp(score - highest)
  float* sums;    // [n_rows]: of the weights
  float* tops;    // [n_rows]: the highest score
  static constexpr int64_t size(int64_t n_rows, int64_t value_stride) { return pad_to(n_rows * (value_stride + 2), 16); }
  SplitSums(float* p, int64_t n_rows, int64_t value_stride)
      : values(p), sums(p + n_rows * value_stride), tops(sums + n_rows) {}
};

// The gate of a feed-forward layer: silu(g) * u; gelu(g) * u in the tanh form; or, with g at most 7 and u within -7..7,
// g * sigmoid(1.702 g) * (u + 1).
enum class Activation : uint8_t { kSilu, kGeluTanh, kClampedSilu };

enum class Dtype : uint8_t { kF16, kBf16, kF32 };
constexpr int64_t dtype_nbytes(Dtype d) { return d == Dtype::kF32 ? 4 : 2; }

// Why a row could not be coded.
enum class Status : uint8_t { kOk, kNan, kInfinite, kScale, kValue };
struct TileStatus {
  Status status = Status::kOk;
  int32_t row = 0;  // within the tile
  int64_t column = 0;
  int64_t n_underflowed = 0;  // groups of nonzero values whose FP16 scale is zero
};

struct RowDifference {
  double largest;  // |y - x|, NaN where there is one
  bool equal;      // every x == y
};

// The levels that weights over their scale are rounded to: integers from a lowest one, that of their group, to that + span;
// or 16 of a codebook, ascending, and the shift of their group added. tree: the middles between a level and the next, as a
// binary search meets them: of node i, the sons are 2i and 2i + 1, the root is 1.
struct Grid {
  float span;
  bool is_asymmetric;  // the lowest integer is for the search to find; else it is the same everywhere
  bool is_codebook;
  float levels[16], tree[16];
  float top_level() const { return -levels[0] > levels[15] ? -levels[0] : levels[15]; }
};
constexpr float kTopScale = 31;  // a scale in steps is one of -31 to 31 of them

// Kernels that use the integer dot product of a tier, and what it could do from registers.
struct DotKernels {
  // GEMV or GEMM, for tiles [tile_begin, tile_end) and all tokens: y[m * ldy + row] = sum_k w[row, k] * x[m, k].
  // Padding rows are written too (as zeros). scratch: kScratchBytes, aligned to 64.
  void (*matmul_int)(const Matrix& w, const IntActivations& x, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                     void* scratch);
  // Put the padded row x (n_columns) of token m into its place.
  void (*prepare_int)(const float* x, int64_t m, const IntActivations& out);

  // Some 1e7 multiplications of a dot product, from registers; returns how many: the ceiling of prefill.
  int64_t (*peak_int)();
  int64_t (*peak_bytes)();
  int64_t (*peak_float)();

  // Whether the dot product of this tier is the one its name promises; for the test that a forced tier really ran.
  const char* (*dot_name)();
};

struct Kernels : DotKernels {
  const char* name;

  // As matmul_int and prepare_int.
  void (*matmul_float)(const Matrix& w, const FloatActivations& x, float* y, int64_t ldy, int64_t tile_begin,
                       int64_t tile_end, void* scratch);
  void (*prepare_float)(const float* x, int64_t m, const FloatActivations& out);

  // out = x * rsqrt(mean(x^2) + eps) * weight; padded rows.
  void (*rmsnorm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // n a multiple of 16; out may be gate or up.
  void (*gated)(Activation activation, const float* gate, const float* up, int64_t n, float* out);
  // x = cap * tanh(x / cap), n a multiple of 16.
  void (*softcap)(float* x, int64_t n, float cap);
  // Softmax of n finite values; x and out are padded rows, and may be one.
  void (*softmax)(const float* x, int64_t n, float* out);

  // Store one token's key and value rows (n_kv_heads * head_dim floats each) at `position`.
  void (*store_kv)(const KvCache& cache, int64_t position, const float* key, const float* value);
  // Attention over one KV split: the keys from kSplitKeys * split on. scratch: kAttentionScratch floats, aligned to 64.
  void (*attention_split)(const KvCache& cache, int64_t kv_head, const Queries& queries, int64_t split,
                          const AttentionRule& rule, const SplitSums& out, float* scratch);
  // Merge n_splits splits, SplitSums::size apart, ascending: row r of the result goes to out[r], head_dim floats.
  void (*merge_splits)(const KvCache& cache, int64_t kv_head, const Queries& queries, const AttentionRule& rule,
                       float* splits, int64_t n_splits, float* const* out);

  // Conversion of one tile: rows (up to 16) of n_columns values, `row_nbytes` apart. zero_points: of kInt4z, else null.
  // scratch: 16 floats for each column of a group and up to a multiple of 16 columns, aligned to 64. row_scratch:
  // n_columns + 16 floats, byte_scratch: as large.
  TileStatus (*quantize_tile)(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                              int64_t group_size, uint32_t* lines, uint16_t* scales, uint8_t* zero_points, float* scratch);
  TileStatus (*pack_tile)(const uint8_t* rows, int64_t row_nbytes, Dtype dtype, int n_rows, int64_t n_columns, Kind kind,
                          uint32_t* lines, float* row_scratch, uint8_t* byte_scratch);

  // Values as float32, n_columns of them and zeros up to a multiple of 16: of a coded row, or of one in a source.
  void (*dequantize_row)(const Matrix& w, int64_t row, float* out);
  void (*load_values)(const uint8_t* row, Dtype dtype, int64_t n, float* out);
  // For each group of columns, in float64 with e = y - x: the sums of x * x, e * e and x * e. Sums run in 16 lanes (lane j
  // takes columns j, j + 16, ... of the group) and end in a tree: lanes 0..7 plus 8..15, then 0..3 plus 4..7, and so on.
  RowDifference (*compare_rows)(const float* x, const float* y, int64_t n, int64_t group_size, double* signal, double* noise,
                                double* cross);

  // Calibrated rounding, of a chunk of n_rows (up to kChunkRows, a multiple of 16) rows (calibrated.inc.h).
  void (*gptq_round)(const float* w, int64_t n, int64_t n_rows, const int32_t* group, const float* scales,
                     const float* qmins, int64_t n_groups, const float* factor, const Grid& grid, int8_t* q, float* acc);
  void (*solve_rows)(float* x, int64_t n, int64_t n_rows, const float* factor, const float* pivots, float* acc);
  void (*refine)(const float* w, int64_t n, int64_t n_rows, int64_t group_size, const float* h, const Grid& grid,
                 int n_rounds, const float* steps, float* scales, const float* qmins, int8_t* q, float* scratch);
  void (*search_scales)(const float* w, int64_t n, const float* factor, const float* pivots, const float* multipliers,
                        int64_t n_multipliers, const Grid& grid, const float* steps, float* scales, float* qmins,
                        float* errors, float* acc);
  // GEMM of panels, and the parts of a factor that are no GEMM.
  void (*multiply_panels)(const float* a, const float* b, int64_t n_k, bool minus, float* c);
  int64_t (*factor_block)(float* raw, int64_t n, int64_t n_columns, float* unit, float* pivots);
  void (*factor_panel)(const float* block, int64_t n, int64_t n_rows, const float* pivots, float* raw, float* unit);

  // Of a sampler (sampling.inc.h). n is a multiple of kPeakBlock. peaks: the largest of each kPeakBlock values, NaN where
  // there is one. weigh: w = exp((x - top) / temperature); returns the sum of the whole weights. sum_weights: of those that
  // are at least `least`.
  void (*peaks)(const float* x, int64_t n, float* out);
  uint64_t (*weigh)(const float* x, int64_t n, float top, float temperature, float* w);
  uint64_t (*sum_weights)(const float* w, int64_t n, float least);

  // Reads nbytes (a multiple of 64, aligned to 4) and returns a word that depends on all of them: the ceiling of decode.
  uint32_t (*read)(const void* data, int64_t nbytes);
};

// Of a GEMM: a block of kGemmTiles tiles, unpacked, and the sums of kMaxTokens tokens.
constexpr size_t kScratchBytes = size_t{kGemmTiles} * kTileRows * 4 * (kBlock + kMaxTokens);

constexpr int64_t kAttentionScratch = int64_t{2} * kTokenGroup * kSplitKeys;

}  // namespace w4conv
