#include "engine/dequantize.h"

#include <cmath>

namespace w4conv {
namespace {

float from_f16(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  if (magnitude < 0x400u) return std::copysign(static_cast<float>(magnitude) * 0x1p-24f, sign ? -1.0f : 1.0f);
  return __builtin_bit_cast(float, sign | ((magnitude << 13) + (112u << 23)));  // weights are finite
}

// Value i of a dword of values.
float value_of(Kind kind, uint32_t bits, int64_t i) {
  if (kind == Kind::kF32) return __builtin_bit_cast(float, bits);
  const uint32_t half = bits >> (16 * i) & 0xFFFFu;
  return kind == Kind::kBf16 ? __builtin_bit_cast(float, half << 16) : from_f16(half);
}

// Level of code i of a dword of codes.
float level_of(Kind kind, uint32_t bits, int64_t i, int zero_point) {
  if (kind == Kind::kInt8) return static_cast<int8_t>(bits >> (8 * i));
  const auto code = static_cast<int>(bits >> (8 * (i % 4) + 4 * (i / 4)) & 15u);
  if (kind == Kind::kNf4) return kNf4Levels[code];
  if (kind == Kind::kFp4) return kFp4Levels[code];
  return static_cast<float>(code - zero_point);
}

}  // namespace

void dequantize_row(const Matrix& w, int64_t row, float* out) {
  const int64_t tile = row / kTileRows, columns = columns_per_dword(w.kind), n_groups = w.n_groups();
  const uint32_t* dword = w.lines + tile * w.n_lines() * 16 + row % kTileRows;
  for (int64_t k = 0; k < w.n_columns; k++) {
    const uint32_t bits = dword[k / columns * 16];
    if (is_float(w.kind)) {
      out[k] = value_of(w.kind, bits, k % columns);
      continue;
    }
    const int64_t at = (tile * n_groups + k / w.group_size) * 16 + row % kTileRows;
    const float scale =
        w.wide_scales ? static_cast<const float*>(w.scales)[at] : from_f16(static_cast<const uint16_t*>(w.scales)[at]);
    out[k] = level_of(w.kind, bits, k % columns, w.zero_points != nullptr ? w.zero_points[at] : 8) * scale;
  }
}

}  // namespace w4conv
