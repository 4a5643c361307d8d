// A two-layer model with every scheme that the engine runs, converted and run by one tier; prints a digest of its codes and
// logits. Built by test_sanitizers.py, which also compares the digests of builds that ought to agree.
#include <cstdio>
#include <vector>

#include "engine/convert.h"
#include "engine/model.h"

#ifndef TIER
#define TIER kScalarKernels
#endif

using namespace w4conv;

namespace {

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u; }
float draw_float() { return static_cast<float>(static_cast<int32_t>(draw()) >> 8) / 8388608.0f; }

uint64_t digest = 1469598103934665603ull;  // FNV-1a
template <class T>
void add(const std::vector<T>& values) {
  const auto* p = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); i++) digest = (digest ^ p[i]) * 1099511628211ull;
}

struct Parts {
  std::vector<uint32_t> lines;
  std::vector<uint16_t> scales;
  std::vector<uint8_t> zero_points;
};
std::vector<std::unique_ptr<Parts>> kept;

void fill(Linear& linear, Pool& pool, int64_t n_rows, int64_t n_columns, Kind kind, int64_t group_size = 32) {
  std::vector<float> values(static_cast<size_t>(n_rows * n_columns));
  for (float& v : values) v = draw_float();
  Matrix w{kind, n_rows, n_columns, is_float(kind) ? 0 : group_size, nullptr, nullptr};
  kept.push_back(std::make_unique<Parts>());
  Parts& parts = *kept.back();
  parts.lines.resize(static_cast<size_t>(w.n_tiles() * 16 * w.n_lines()));
  parts.scales.resize(static_cast<size_t>(w.n_tiles() * 16 * w.n_groups()));
  if (kind == Kind::kInt4z) parts.zero_points.resize(parts.scales.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  convert_block(TIER, pool, bytes, Dtype::kF32, n_rows, n_columns, kind, group_size, parts.lines.data(), parts.scales.data(),
                kind == Kind::kInt4z ? parts.zero_points.data() : nullptr);
  add(parts.lines);
  add(parts.scales);
  add(parts.zero_points);
  w.lines = parts.lines.data();
  w.scales = parts.scales.data();
  w.zero_points = parts.zero_points.data();
  linear.weight = w;
}

void fill(std::vector<float>& norm, int64_t n) {
  norm.assign(static_cast<size_t>(pad_to(n, kTileRows)), 0.0f);
  for (int64_t i = 0; i < n; i++) norm[i] = 1.0f + draw_float() / 4;
}

// One model on all the tokens and, again, on the last one by itself.
void run(const ModelConfig& c, int activation_bits) {
  Pool pool(2);
  Model model(c, 2, TIER, activation_bits);
  fill(model.embedding, pool, 99, 72, Kind::kInt8);
  fill(model.final_norm, 72);
  for (int i = 0; i < 2; i++) {
    Layer& l = model.layer(i);
    fill(l.input_norm, 72);
    fill(l.post_norm, 72);
    fill(l.q, pool, 72, 72, i == 0 ? Kind::kInt4 : Kind::kF16);
    fill(l.k, pool, 24, 72, Kind::kInt4, 72);
    fill(l.v, pool, 24, 72, i == 0 ? Kind::kBf16 : Kind::kFp4);
    fill(l.o, pool, 72, 72, i == 0 ? Kind::kF32 : Kind::kNf4);
    fill(l.gate, pool, 200, 72, i == 0 ? Kind::kInt4 : Kind::kInt4z);
    fill(l.up, pool, 200, 72, Kind::kInt8);
    fill(l.down, pool, 72, 200, Kind::kInt4, 128);
  }
  std::vector<int32_t> tokens(100);
  for (int32_t& t : tokens) t = static_cast<int32_t>(draw() % 99);
  for (const bool wide : {false, true}) {
    Session session(c, 100, wide);
    std::vector<float> logits(99 * 99), last(99);
    model.forward(session, tokens.data(), 99, true, logits.data());
    model.forward(session, tokens.data() + 99, 1, false, last.data());
    add(logits);
    add(last);
  }
}

}  // namespace

int main() {
  ModelConfig c;
  c.vocab_size = 99, c.hidden_size = 72, c.intermediate_size = 200, c.n_layers = 2;
  c.n_heads = 6, c.n_kv_heads = 2, c.head_dim = 12, c.norm_eps = 1e-5f;
  c.windows = {0, 30};
  for (int i = 0; i < 6; i++) c.inverse_frequencies.push_back(1.0f / static_cast<float>(1 + i * i));
  run(c, 16);
  run(c, 8);
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
}
