#include "engine/dequantize.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace w4conv {
namespace {

constexpr int64_t kRowsATask = 16;

float from_f16(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  const auto tiny = __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? tiny : (magnitude << 13) + (112u << 23);
  return __builtin_bit_cast(float, sign | (magnitude < 0x7C00u ? finite : magnitude << 13 | 0x7F800000u));
}

// What a 4-bit code stands for, before the scale.
void make_levels(const Matrix& w, int zero_point, float (&levels)[16]) {
  for (int code = 0; code < 16; code++) {
    levels[code] = is_codebook(w.kind) ? w4conv::levels_of(w.kind)[code] : static_cast<float>(code - zero_point);
  }
}

// Columns [begin, end), which share a scale; begin is a multiple of 32 or 0. offset: of kInt4o.
void dequantize_group(const Matrix& w, const uint32_t* dwords, int64_t begin, int64_t end, float scale, int zero_point,
                      float offset, float* out) {
  if (w.kind == Kind::kInt8) {
    for (int64_t k = begin; k < end; k++) {
      out[k] = static_cast<float>(static_cast<int8_t>(dwords[k / 4 * 16] >> (8 * (k % 4)))) * scale;
    }
    return;
  }
  float values[16];
  make_levels(w, zero_point, values);
  for (float& v : values) v *= scale;
  for (float& v : values) v = w.kind == Kind::kInt4o ? v + offset : v;  // a sum with 0 would lose the sign of -0
  for (int64_t k = begin; k < end; k += 8) {
    const uint32_t bits = dwords[k / 8 * 16];
    float eight[8];
    for (int i = 0; i < 4; i++) {
      eight[i] = values[bits >> (8 * i) & 15u];
      eight[i + 4] = values[bits >> (8 * i + 4) & 15u];
    }
    std::copy_n(eight, std::min<int64_t>(8, end - k), out + k);
  }
}

// The larger one; a NaN stays.
double larger(double a, double b) { return a != a || b <= a ? a : b; }

struct Sums {
  double signal[16] = {}, noise[16] = {}, cross[16] = {};
};
double tree(double (&s)[16]) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  }
  return s[0];
}

}  // namespace

void dequantize_row(const Matrix& w, int64_t row, float* out) {
  const int64_t tile = row / kTileRows, lane = row % kTileRows;
  const uint32_t* dwords = w.lines + tile * w.n_lines() * 16 + lane;
  if (w.kind == Kind::kF32) {
    for (int64_t k = 0; k < w.n_columns; k++) out[k] = __builtin_bit_cast(float, dwords[k * 16]);
    return;
  }
  if (is_float(w.kind)) {
    for (int64_t k = 0; k < w.n_columns; k++) {
      const uint32_t half = dwords[k / 2 * 16] >> (16 * (k % 2)) & 0xFFFFu;
      out[k] = w.kind == Kind::kBf16 ? __builtin_bit_cast(float, half << 16) : from_f16(half);
    }
    return;
  }
  const int64_t n_groups = w.n_groups();
  for (int64_t g = 0; g < n_groups; g++) {
    const int64_t at = (tile * n_groups + g) * 16 + lane, begin = g * w.group_size;
    auto number = [&](const void* p) {
      return w.wide_scales ? static_cast<const float*>(p)[at] : from_f16(static_cast<const uint16_t*>(p)[at]);
    };
    const int zero_point = w.kind == Kind::kInt4z ? w.zero_points[at] : w.kind == Kind::kInt4o ? 0 : 8;
    const float offset = w.kind == Kind::kInt4o ? number(w.offsets) : 0.0f;
    dequantize_group(w, dwords, begin, std::min(w.n_columns, begin + w.group_size), number(w.scales), zero_point, offset,
                     out);
  }
}

void dequantize(Pool& pool, const Matrix& w, float* out) {
  pool.run((w.n_rows + kRowsATask - 1) / kRowsATask, [&](int64_t task, int) {
    for (int64_t row = task * kRowsATask; row < std::min(w.n_rows, (task + 1) * kRowsATask); row++) {
      dequantize_row(w, row, out + row * w.n_columns);
    }
  });
}

double distortion_sums(Pool& pool, const float* x, const float* y, int64_t n_rows, int64_t n_columns, int64_t group_size,
                       double* signal, double* noise, double* cross) {
  const int64_t n_groups = (n_columns + group_size - 1) / group_size;
  std::vector<double> largest(static_cast<size_t>(n_rows));
  pool.run((n_rows + kRowsATask - 1) / kRowsATask, [&](int64_t task, int) {
    for (int64_t row = task * kRowsATask; row < std::min(n_rows, (task + 1) * kRowsATask); row++) {
      double top[16] = {};
      for (int64_t g = 0; g < n_groups; g++) {
        const int64_t begin = g * group_size, n = std::min(group_size, n_columns - begin);
        const float *p = x + row * n_columns + begin, *q = y + row * n_columns + begin;
        Sums s;
        auto take = [&](int64_t i, int j) {
          const double a = p[i], e = static_cast<double>(q[i]) - a;
          s.signal[j] += a * a;
          s.noise[j] += e * e;
          s.cross[j] += a * e;
          top[j] = larger(top[j], std::fabs(e));
        };
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) {
          for (int j = 0; j < 16; j++) take(i + j, j);
        }
        for (int j = 0; i + j < n; j++) take(i + j, j);
        signal[row * n_groups + g] = tree(s.signal);
        noise[row * n_groups + g] = tree(s.noise);
        cross[row * n_groups + g] = tree(s.cross);
      }
      for (const double t : top) largest[row] = larger(largest[row], t);
    }
  });
  double out = 0;
  for (const double t : largest) out = larger(out, t);
  return out;
}

}  // namespace w4conv
