// One call of a hot loop, for instructions.py to count: program TIER-TABLE is fixed by -DTIER; arguments: loop, kind, bits,
// tokens. What runs inside `hot` is counted.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ops/inputs.h"
#include "ops/pool.h"

namespace w4conv::TIER {
extern const Kernels kKernels;
}

using namespace w4conv;

namespace {

constexpr int64_t kRows = 64, kColumns = 1024, kGroup = 128;

Kind kind_named(const std::string& name) {
  const char* names[] = {"int4", "int4z", "int4o", "e2m1",  "iq4nl", "nl4",  "nl3",
                         "nf4",  "fp4",   "int8",  "int8o", "f16",   "bf16", "f32"};
  for (int i = 0; i < 14; i++) {
    if (name == names[i]) return static_cast<Kind>(i);
  }
  std::abort();
}

}  // namespace

template <class F>
[[gnu::noinline]] void hot(const F& f) {
  f();
}

int main(int, char** argv) {
  const std::string loop = argv[1];
  const Kind kind = kind_named(argv[2]);
  const int bits = std::atoi(argv[3]);
  const int64_t n_tokens = std::atoi(argv[4]);
  Matrix w;
  w.kind = kind, w.n_rows = kRows, w.n_columns = kColumns, w.group_size = is_float(kind) ? 0 : kGroup;
  std::vector<uint32_t> lines(static_cast<size_t>(w.n_tiles() * w.n_lines() * 16), 0x3C3C3C3Cu);
  std::vector<uint16_t> scales(static_cast<size_t>(w.n_tiles() * w.n_groups() * 16) + 16, 0x2000);
  std::vector<uint8_t> points(scales.size(), 7);
  w.lines = lines.data(), w.scales = scales.data(), w.zero_points = points.data();
  w.offsets = scales.data();
  std::vector<float> row(kColumns + 16);
  for (size_t i = 0; i < row.size(); i++) row[i] = static_cast<float>(i % 31) - 15.0f;
  if (loop == "quantize") {
    std::vector<uint16_t> values(16 * kColumns, 0x3555);
    Buffer scratch;
    scratch.reserve_for<float>(16 * kGroup);
    hot([&] {
      w4conv::TIER::kKernels.quantize_tile(reinterpret_cast<const uint8_t*>(values.data()), 2 * kColumns, Dtype::kF16, 16,
                                           kColumns, kind, kGroup, lines.data(), scales.data(), points.data(),
                                           scratch.as<float>());
    });
    return 0;
  }
  Inputs inputs(bits);
  inputs.plan(n_tokens, kColumns, {&w});
  if (loop == "prepare") {
    hot([&] { inputs.put(w4conv::TIER::kKernels, row.data(), 0); });
    return 0;
  }
  for (int64_t m = 0; m < n_tokens; m++) inputs.put(w4conv::TIER::kKernels, row.data(), m);
  std::vector<float> y(static_cast<size_t>(kRows * n_tokens));
  Buffer scratch;
  scratch.reserve(kScratchBytes);
  hot([&] { inputs.multiply(w4conv::TIER::kKernels, w, y.data(), kRows, 0, w.n_tiles(), scratch.as<char>()); });
  return 0;
}
