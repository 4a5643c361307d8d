#include "bindings/bindings.h"

#include <algorithm>
#include <atomic>

#include "ops/inputs.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

void matmul(Pool& pool, const MatrixParts& parts, const FloatRows& x, const MutableFloatRows& y, int activation_bits) {
  const Matrix w = parts.matrix();
  const auto n = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require(width == pad_to(w.n_columns, kTileRows), "x: rows are not padded to 16");
  require(n > 0 && static_cast<int64_t>(y.shape(0)) == n, "y: wrong number of rows");
  require(static_cast<int64_t>(y.shape(1)) == w.n_tiles() * kTileRows, "y: rows are not padded to 16");
  require(activation_bits == 8 || activation_bits == 16, "activations have 8 or 16 bits");
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  Inputs inputs(activation_bits);
  inputs.plan(n, w.n_columns, {&w});
  for (int64_t m = 0; m < n; m++) inputs.put(k, x.data() + m * width, m);
  Buffer scratch;
  scratch.reserve(kScratchBytes * static_cast<size_t>(pool.n_threads()));
  constexpr int64_t kChunk = 8;
  pool.run((w.n_tiles() + kChunk - 1) / kChunk, [&](int64_t task, int thread) {
    inputs.multiply(k, w, y.data(), w.n_tiles() * kTileRows, task * kChunk, std::min(w.n_tiles(), (task + 1) * kChunk),
                    scratch.as<char>() + kScratchBytes * static_cast<size_t>(thread));
  });
}

// Read all bytes once, in chunks claimed by the threads as a GEMM's are.
uint32_t read_all(Pool& pool, const Bytes& data) {
  require(data.size() % 64 == 0 && reinterpret_cast<uintptr_t>(data.data()) % 4 == 0, "data: not whole lines");
  constexpr int64_t kChunk = int64_t{1} << 20;
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  const auto n = static_cast<int64_t>(data.size());
  std::atomic<uint32_t> out{0};
  pool.run((n + kChunk - 1) / kChunk,
           [&](int64_t task, int) { out ^= k.read(data.data() + task * kChunk, std::min(kChunk, n - task * kChunk)); });
  return out;
}

// Multiply from registers on every thread; returns the number of multiplications.
int64_t multiply_registers(Pool& pool, const std::string& operands) {
  require(operands == "int16" || operands == "int8" || operands == "float", "operands: neither int16, int8 nor float");
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  std::atomic<int64_t> out{0};
  const auto peak = operands == "float" ? k.peak_float : operands == "int8" ? k.peak_bytes : k.peak_int;
  pool.run(64 * pool.n_threads(), [&](int64_t, int) { out += peak(); });
  return out;
}

}  // namespace

void register_matmul(nb::module_& m) {
  m.def("matmul", &matmul, "pool"_a, "parts"_a, "x"_a, "y"_a, "activation_bits"_a);
  m.def("read", &read_all, "pool"_a, "data"_a);
  m.def("multiply_registers", &multiply_registers, "pool"_a, "operands"_a);
}

}  // namespace w4conv::bindings
