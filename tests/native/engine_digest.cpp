// A two-layer model with every scheme that the engine runs, converted and run by one tier; prints a digest of its codes and
// logits. Built by test_sanitizers.py, which also compares the digests of builds that ought to agree.
#include <cstdio>
#include <vector>

#include "ops/convert.h"
#include "engine/model.h"

// TIER: whose kernels run; DOT_TIER: whose integer dot product, where it is another's.
#ifndef TIER
#define TIER scalar
#endif
namespace w4conv::TIER {
extern const Kernels kKernels;
}
#ifdef DOT_TIER
namespace w4conv::DOT_TIER {
extern const DotKernels kKernels;
}
#endif

using namespace w4conv;

namespace {

const Kernels tier = [] {
  Kernels kernels = w4conv::TIER::kKernels;
#ifdef DOT_TIER
  static_cast<DotKernels&>(kernels) = w4conv::DOT_TIER::kKernels;
#endif
  return kernels;
}();

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
  // Kinds that nothing is rounded to take the codes of others.
  const Kind rounded = kind == Kind::kInt4o ? Kind::kInt4z : kind == Kind::kE2m1 ? Kind::kFp4 : kind;
  if (rounded == Kind::kInt4z) parts.zero_points.resize(parts.scales.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  convert_block(tier, pool, bytes, Dtype::kF32, n_rows, n_columns, rounded, group_size, parts.lines.data(),
                parts.scales.data(), rounded == Kind::kInt4z ? parts.zero_points.data() : nullptr);
  add(parts.lines);
  add(parts.scales);
  add(parts.zero_points);
  w.lines = parts.lines.data();
  w.scales = parts.scales.data();
  w.zero_points = parts.zero_points.data();
  w.offsets = parts.scales.data();
  linear.weight = w;
}

void fill(Norm& norm, int64_t n) {
  norm.n = n;
  norm.weight.assign(static_cast<size_t>(pad_to(n, kTileRows)), 0.0f);
  for (int64_t i = 0; i < n; i++) norm.weight[i] = 1.0f + draw_float() / 4;
}

// One model on pieces of a text, for every number of tokens with kernels of its own, and on its last token by itself.
void run(const ModelConfig& c) {
  Pool pool(2);
  Model model(c, 2, tier);
  fill(model.embedding, pool, 99, 72, Kind::kInt8);
  fill(model.final_norm, 72);
  for (int i = 0; i < 2; i++) {
    Layer& l = model.layer(i);
    fill(l.attention_norm, 72);
    fill(l.mlp_norm, 72);
    if (i == 1) fill(l.q_norm, 12), fill(l.k_norm, 24), fill(l.attention_out_norm, 72);
    if (i == 1) l.sinks = {1, 2, -1, 0, 0.5f, 3};
    fill(l.q, pool, 72, 72, i == 0 ? Kind::kInt4 : Kind::kF16);
    fill(l.k, pool, 24, 72, Kind::kInt4, 72);
    fill(l.v, pool, 24, 72, i == 0 ? Kind::kBf16 : Kind::kFp4);
    fill(l.o, pool, 72, 72, i == 0 ? Kind::kF32 : Kind::kNf4);
    // 13 tiles, which fill no even number of streams; 49 lines of int8, an odd number.
    fill(l.mlp.gate, pool, 196, 72, i == 0 ? Kind::kInt4 : Kind::kInt4z);
    fill(l.mlp.up, pool, 196, 72, i == 0 ? Kind::kInt8 : Kind::kInt4o);
    fill(l.mlp.down, pool, 72, 196, i == 0 ? Kind::kInt4 : Kind::kInt8, 128);
  }
  Layer& routed = model.layer(2);
  fill(routed.mlp_norm, 72);
  fill(routed.qkv, pool, 72 + 2 * 24, 72, Kind::kInt4);
  fill(routed.o, pool, 72, 72, Kind::kInt4, 72);
  fill(routed.router, pool, 3, 72, Kind::kF32);
  routed.experts.resize(3);
  for (FeedForward& f : routed.experts) {
    fill(f.gate_up, pool, 2 * 40, 72, Kind::kInt4);
    fill(f.down, pool, 72, 40, Kind::kE2m1);
  }
  // Past the first span of keys, and past what the windows keep.
  std::vector<int32_t> tokens(421);
  for (int32_t& t : tokens) t = static_cast<int32_t>(draw() % 99);
  for (const KvKind kind : {KvKind::kF16, KvKind::kF32, KvKind::kInt8}) {
    for (const int64_t window : {0, 50}) {
      Session session(c, {421, kind, window});
      std::vector<float> logits;
      for (const int64_t n : {105, 105, 105, 28, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2}) {
        logits.resize(static_cast<size_t>(n * 99));
        model.forward(session, tokens.data() + session.n_tokens(), n, true, logits.data());
        add(logits);
      }
      logits.resize(99);
      model.forward(session, tokens.data() + 420, 1, false, logits.data());
      add(logits);
    }
  }
}

}  // namespace

int main() {
  ModelConfig c;
  c.vocab_size = 99, c.hidden_size = 72, c.n_heads = 6, c.n_kv_heads = 2, c.head_dim = 12, c.norm_eps = 1e-5f;
  c.attention_scale = 0.3f, c.n_experts_per_token = 2;
  RopeFrequencies rope{6, 40, 1.0f, {}};  // 6 pairs; from position 40 on, those of a second row
  for (int i = 0; i < 12; i++) rope.values.push_back(1.0f / static_cast<float>(1 + i * i));
  c.ropes = {rope};
  c.layers = {{0, 0}, {0, 30}, {-1, 0}};
  c.attention_softcap = 5.0f, c.final_softcap = 20.0f, c.activation = Activation::kGeluTanh;
  for (const int bits : {16, 8}) {
    c.activation_bits = bits;
    run(c);
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
}
