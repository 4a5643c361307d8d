// Rotary position embedding: tables of cos and sin, and their application to one row.
#pragma once
#include <cstdint>
#include <vector>

namespace w4conv {

// cos and sin of position * frequency, both rounded as float32 products; own arithmetic, as libraries differ in last bits.
class Rope {
 public:
  explicit Rope(std::vector<float> inverse_frequencies) : frequencies_(std::move(inverse_frequencies)) {}

  // Make the table reach `n_positions`. Not thread-safe.
  void extend(int64_t n_positions);
  // Rotate n_heads heads of a row in place: pairs (i, i + head_dim / 2).
  void rotate(float* row, int64_t n_heads, int64_t head_dim, int64_t position) const;

 private:
  std::vector<float> frequencies_;  // head_dim / 2
  std::vector<float> cos_, sin_;    // [position][head_dim / 2]
};

}  // namespace w4conv
