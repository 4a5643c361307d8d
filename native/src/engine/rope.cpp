#include "engine/rope.h"

#include <algorithm>
#include <cmath>

#include "w4conv/kernels.h"

namespace w4conv {
namespace {

struct CosSin {
  double cos, sin;
};

// |x| < 2^20 * pi / 2; absolute error below 1e-14. Reduction by pi / 2 in two parts (33 bits, and the rest), then the
// Taylor polynomials of sin and cos on [-pi/4, pi/4].
CosSin cos_sin(double x) {
  constexpr double kHigh = 0x1.921fb544p0, kLow = 0x1.0b4611a626331p-34;
  const double n = std::nearbyint(x * 0x1.45f306dc9c883p-1);
  const double r = (x - n * kHigh) - n * kLow;
  const double z = r * r;
  double s = 0, c = 0;
  // terms r^(2k+1) / (2k+1)! and r^2k / (2k)!, smallest first
  constexpr double kSin[] = {1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800,
                             1.0 / 362880,          -1.0 / 5040,          1.0 / 120,        -1.0 / 6};
  constexpr double kCos[] = {1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800,
                             1.0 / 40320,          -1.0 / 720,         1.0 / 24,        -1.0 / 2};
  for (double k : kSin) s = s * z + k;
  for (double k : kCos) c = c * z + k;
  s = r + r * z * s;
  c = 1.0 + z * c;
  switch (static_cast<int64_t>(n) & 3) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

}  // namespace

void Rope::add_frequencies(const float* rows, int64_t n) {
  frequencies_.values.insert(frequencies_.values.end(), rows, rows + n * frequencies_.n_pairs);
}

void Rope::extend(int64_t n_positions) {
  const RopeFrequencies& f = frequencies_;
  const int64_t n = f.n_pairs, n_rows = static_cast<int64_t>(f.values.size()) / n;
  const int64_t have = static_cast<int64_t>(cos_.size()) / n;
  if (have >= n_positions) return;
  cos_.resize(static_cast<size_t>(n_positions * n));
  sin_.resize(static_cast<size_t>(n_positions * n));
  for (int64_t p = have; p < n_positions; p++) {
    const float* row = f.values.data() + std::clamp<int64_t>(p + 1 - f.n_plain, 0, n_rows - 1) * n;
    for (int64_t i = 0; i < n; i++) {
      const CosSin v = cos_sin(static_cast<float>(p) * row[i]);
      cos_[p * n + i] = static_cast<float>(v.cos) * f.magnitude;
      sin_[p * n + i] = static_cast<float>(v.sin) * f.magnitude;
    }
  }
}

void Rope::rotate(float* row, int64_t n_heads, int64_t head_dim, int64_t position) const {
  const int64_t n = frequencies_.n_pairs;
  const float* cos = cos_.data() + position * n;
  const float* sin = sin_.data() + position * n;
  for (int64_t h = 0; h < n_heads; h++, row += head_dim) {
    for (int64_t i = 0; i < n; i++) {
      const float a = row[i], b = row[i + n];
      row[i] = a * cos[i] - b * sin[i];
      row[i + n] = b * cos[i] + a * sin[i];
    }
  }
}

const float* Rope::cos_sin_tiles(int64_t head_dim) {
  const int64_t n = frequencies_.n_pairs, n_rows = n_bias_terms(head_dim);
  const int64_t n_positions = static_cast<int64_t>(cos_.size()) / n, step = n_rows * kKeyTile;
  const int64_t have = static_cast<int64_t>(cos_sin_.size()) / step * kKeyTile;
  if (n_positions > have) {
    // By half as many again, so that a token at a time costs little; the last tile may have been incomplete.
    cos_sin_.resize(static_cast<size_t>(pad_to(n_positions + n_positions / 2, kKeyStep) * n_rows), 1.0f);
  }
  for (; n_tiled_ < n_positions; n_tiled_++) {
    float* const out = cos_sin_.data() + n_tiled_ / kKeyTile * step + n_tiled_ % kKeyTile;
    for (int64_t i = 0; i < n; i++) {
      out[i * kKeyTile] = cos_[n_tiled_ * n + i];
      out[(i + n) * kKeyTile] = sin_[n_tiled_ * n + i];
    }
  }
  return cos_sin_.data();
}

void Rope::bias_terms(const float* q, const float* bias, int64_t head_dim, float* out, int64_t stride) const {
  const int64_t n = frequencies_.n_pairs;
  for (int64_t i = 0; i < n; i++) {
    out[i * stride] = q[i] * bias[i] + q[i + n] * bias[i + n];
    out[(i + n) * stride] = q[i + n] * bias[i] - q[i] * bias[i + n];
  }
  if (head_dim == 2 * n) return;
  float sum = 0;
  for (int64_t i = 2 * n; i < head_dim; i++) sum += q[i] * bias[i];
  out[2 * n * stride] = sum;
}

}  // namespace w4conv
