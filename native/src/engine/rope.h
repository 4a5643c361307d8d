// Rotary position embedding: tables of cos and sin, and their application to one row.
#pragma once
#include <cstdint>
#include <vector>

namespace w4conv {

// Angular frequencies in radians a position, of the pairs (i, i + n_pairs) at the front of each head; what lies behind
// 2 * n_pairs is left as it is. Position p takes row p + 1 - n_plain of the rows, the first below and the last above.
struct RopeFrequencies {
  int64_t n_pairs = 0;
  int64_t n_plain = 0;        // positions that take the first row
  float magnitude = 1;        // of cos and sin
  std::vector<float> values;  // [row][n_pairs]
};

// cos and sin of position * frequency, both rounded as float32 products; own arithmetic, as libraries differ in last bits.
class Rope {
 public:
  explicit Rope(RopeFrequencies frequencies) : frequencies_(std::move(frequencies)) {}

  // More rows of frequencies, [n][n_pairs], behind those that there are; before `extend` reaches them. Not thread-safe.
  void add_frequencies(const float* rows, int64_t n);
  // Make the table reach `n_positions`. Not thread-safe.
  void extend(int64_t n_positions);
  // Rotate n_heads heads of a row in place.
  void rotate(float* row, int64_t n_heads, int64_t head_dim, int64_t position) const;

  // The product of a query q with a key's bias b, rotated to position p, is a product of two vectors, one of which is the
  // same for all layers and heads: cos and sin of p for each pair, and 1 for the dimensions that are not rotated.
  int64_t n_bias_terms(int64_t head_dim) const { return 2 * frequencies_.n_pairs + (head_dim > 2 * frequencies_.n_pairs); }
  // That vector for each position that the table reaches, laid out as the keys of a float32 cache. Not thread-safe.
  const float* cos_sin_tiles(int64_t head_dim);
  // The other one, n_bias_terms values `stride` apart; bias: of the head's dimensions.
  void bias_terms(const float* q, const float* bias, int64_t head_dim, float* out, int64_t stride) const;

 private:
  RopeFrequencies frequencies_;
  std::vector<float> cos_, sin_;  // [position][n_pairs]
  std::vector<float> cos_sin_;    // [position tile][n_bias_terms][16]
  int64_t n_tiled_ = 0;           // positions in it
};

}  // namespace w4conv
