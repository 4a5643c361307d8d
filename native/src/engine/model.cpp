#include "engine/model.h"

#include <algorithm>
#include <cmath>

#include "engine/dequantize.h"

namespace w4conv {
namespace {

int64_t padded(int64_t n) { return pad_to(n, kTileRows); }

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += y[i];
}
void add_bias(float* x, const Linear& linear) {
  if (!linear.bias.empty()) add(x, linear.bias.data(), linear.weight.n_rows);
}

void copy_rows(float* to, const float* from, int64_t n) {
  if (to != nullptr) std::copy_n(from, n, to);
}

}  // namespace

Session::Session(const ModelConfig& c, int64_t n_positions, bool wide) : n_positions_(n_positions) {
  const int64_t capacity = pad_to(n_positions, kKeyBlock);
  const int64_t nbytes = wide ? 4 : 2;
  buffers_ = std::vector<Buffer>(static_cast<size_t>(2 * c.n_layers));
  for (int64_t i = 0; i < c.n_layers; i++) {
    KvCache cache{c.n_kv_heads, c.head_dim, capacity, wide, nullptr, nullptr};
    cache.keys = buffers_[2 * i].reserve(static_cast<size_t>(c.n_kv_heads * capacity * c.head_dim * nbytes));
    cache.values = buffers_[2 * i + 1].reserve(static_cast<size_t>(c.n_kv_heads * capacity * cache.value_stride() * nbytes));
    layers_.push_back(cache);
  }
}

Model::Model(ModelConfig config, int n_threads, const Kernels& kernels, int activation_bits)
    : config_(std::move(config)),
      kernels_(kernels),
      pool_(n_threads),
      rope_(config_.inverse_frequencies),
      layers_(static_cast<size_t>(config_.n_layers)),
      inputs_(activation_bits) {
  scratch_.reserve(kScratchBytes * static_cast<size_t>(n_threads));
  attention_scratch_.reserve_for<float>(attention_scratch(config_.n_heads / config_.n_kv_heads, config_.head_dim) *
                                        n_threads);
}

void Model::embed(int32_t token, float* out) const {
  std::fill(out, out + padded(embedding.weight.n_columns), 0.0f);
  dequantize_row(embedding.weight, token, out);
}

void Model::multiply(std::initializer_list<Product> products) {
  int64_t n_tiles = 0;
  for (const Product& p : products) n_tiles += p.linear->weight.n_tiles();
  // Several chunks a thread even out a busy core; whole fours of tiles suit the kernels.
  const int64_t chunk = std::max<int64_t>(4, pad_to(n_tiles / (pool_.n_threads() * 8) + 1, 4));
  pool_.run((n_tiles + chunk - 1) / chunk, [&](int64_t task, int thread) {
    char* scratch = scratch_.as<char>() + kScratchBytes * static_cast<size_t>(thread);
    int64_t begin = task * chunk, end = std::min(n_tiles, begin + chunk), first = 0;
    for (const Product& p : products) {
      const int64_t n = p.linear->weight.n_tiles();
      const int64_t from = std::max(begin, first), to = std::min(end, first + n);
      if (from < to) inputs_.multiply(kernels_, p.linear->weight, p.y, p.ldy, from - first, to - first, scratch);
      first += n;
    }
  });
}

void Model::run_layer(int64_t i, Session& session, int64_t n, float* x, const Capture& capture) {
  const ModelConfig& c = config_;
  const int64_t hidden = padded(c.hidden_size), inner = padded(c.intermediate_size);
  const int64_t q_width = padded(c.n_heads * c.head_dim), kv_width = padded(c.n_kv_heads * c.head_dim);
  const int64_t n_group = c.n_heads / c.n_kv_heads;
  const int64_t start = session.n_tokens;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  rope_.extend(start + n);

  float* const normed = normed_.reserve_for<float>(n * hidden);
  float* const q = q_.reserve_for<float>(n * q_width);
  float* const k = k_.reserve_for<float>(n * kv_width);
  float* const v = v_.reserve_for<float>(n * kv_width);
  float* const attended = attended_.reserve_for<float>(n * q_width);
  float* const gate = gate_.reserve_for<float>(n * inner);
  float* const up = up_.reserve_for<float>(n * inner);
  float* const out = out_.reserve_for<float>(n * hidden);

  auto norm_into_inputs = [&](int64_t m, const std::vector<float>& weight) {
    kernels_.rmsnorm(x + m * hidden, weight.data(), c.norm_eps, c.hidden_size, normed + m * hidden);
    inputs_.put(kernels_, normed + m * hidden, m);
  };
  const Layer& layer = layers_[i];
  const KvCache& cache = session.cache(i);
  const int64_t window = c.windows.empty() ? 0 : c.windows[i];

  // 1. attention inputs
  inputs_.plan(n, c.hidden_size, {&layer.q.weight, &layer.k.weight, &layer.v.weight});
  pool_.run(n, [&](int64_t m, int) { norm_into_inputs(m, layer.input_norm); });
  copy_rows(capture.qkv, normed, n * hidden);
  multiply({{&layer.q, q, q_width}, {&layer.k, k, kv_width}, {&layer.v, v, kv_width}});
  pool_.run(n, [&](int64_t m, int) {
    add_bias(q + m * q_width, layer.q);
    add_bias(k + m * kv_width, layer.k);
    add_bias(v + m * kv_width, layer.v);
    rope_.rotate(q + m * q_width, c.n_heads, c.head_dim, start + m);
    rope_.rotate(k + m * kv_width, c.n_kv_heads, c.head_dim, start + m);
    kernels_.store_kv(cache, start + m, k + m * kv_width, v + m * kv_width);
  });

  // 2. attention
  const int64_t scratch_size = attention_scratch(n_group, c.head_dim);
  pool_.run(n * c.n_kv_heads, [&](int64_t task, int thread) {
    const int64_t m = task / c.n_kv_heads, head = task % c.n_kv_heads, position = start + m;
    const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    const int64_t at = m * q_width + head * n_group * c.head_dim;
    kernels_.attention(cache, head, n_group, first, position, scale, q + at, attended + at,
                       attention_scratch_.as<float>() + scratch_size * thread);
  });
  const int64_t q_used = c.n_heads * c.head_dim;
  inputs_.plan(n, q_used, {&layer.o.weight});
  pool_.run(n, [&](int64_t m, int) {
    float* row = attended + m * q_width;
    std::fill(row + q_used, row + q_width, 0.0f);
    inputs_.put(kernels_, row, m);
  });
  copy_rows(capture.o, attended, n * q_width);
  multiply({{&layer.o, out, hidden}});

  // 3. feed-forward
  inputs_.plan(n, c.hidden_size, {&layer.gate.weight, &layer.up.weight});
  pool_.run(n, [&](int64_t m, int) {
    add_bias(out + m * hidden, layer.o);
    add(x + m * hidden, out + m * hidden, hidden);
    norm_into_inputs(m, layer.post_norm);
  });
  copy_rows(capture.gate_up, normed, n * hidden);
  multiply({{&layer.gate, gate, inner}, {&layer.up, up, inner}});
  inputs_.plan(n, c.intermediate_size, {&layer.down.weight});
  pool_.run(n, [&](int64_t m, int) {
    add_bias(gate + m * inner, layer.gate);
    add_bias(up + m * inner, layer.up);
    kernels_.swiglu(gate + m * inner, up + m * inner, inner, gate + m * inner);
    inputs_.put(kernels_, gate + m * inner, m);
  });
  copy_rows(capture.down, gate, n * inner);
  multiply({{&layer.down, out, hidden}});
  pool_.run(n, [&](int64_t m, int) {
    add_bias(out + m * hidden, layer.down);
    add(x + m * hidden, out + m * hidden, hidden);
  });
}

void Model::forward(Session& session, const int32_t* tokens, int64_t n, bool all_logits, float* logits) {
  const ModelConfig& c = config_;
  const int64_t hidden = padded(c.hidden_size);
  float* const x = hidden_.reserve_for<float>(n * hidden);
  pool_.run(n, [&](int64_t m, int) { embed(tokens[m], x + m * hidden); });
  for (int64_t i = 0; i < c.n_layers; i++) run_layer(i, session, n, x);
  session.n_tokens += n;
  const int64_t n_out = all_logits ? n : 1;
  finish(x + (n - n_out) * hidden, n_out, logits);
}

void Model::finish(const float* x, int64_t n, float* logits) {
  const ModelConfig& c = config_;
  const int64_t hidden = padded(c.hidden_size), width = padded(c.vocab_size);
  const Linear& output = head.weight.lines != nullptr ? head : embedding;
  float* const normed = normed_.reserve_for<float>(n * hidden);
  float* const scores = logits_.reserve_for<float>(n * width);
  inputs_.plan(n, c.hidden_size, {&output.weight});
  pool_.run(n, [&](int64_t m, int) {
    kernels_.rmsnorm(x + m * hidden, final_norm.data(), c.norm_eps, c.hidden_size, normed + m * hidden);
    inputs_.put(kernels_, normed + m * hidden, m);
  });
  multiply({{&output, scores, width}});
  for (int64_t m = 0; m < n; m++) std::copy_n(scores + m * width, c.vocab_size, logits + m * c.vocab_size);
}

}  // namespace w4conv
