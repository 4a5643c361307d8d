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
void scale(float* x, float factor, int64_t n) {
  if (factor == 1) return;
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace

Session::Session(const ModelConfig& c, int64_t n_positions, bool wide) : n_positions_(n_positions) {
  const int64_t capacity = pad_to(n_positions, kKeyBlock);
  const int64_t nbytes = wide ? 4 : 2;
  buffers_ = std::vector<Buffer>(static_cast<size_t>(2 * c.n_layers()));
  for (int64_t i = 0; i < c.n_layers(); i++) {
    KvCache cache{c.n_kv_heads, c.head_dim, capacity, wide, nullptr, nullptr};
    cache.keys = buffers_[2 * i].reserve(static_cast<size_t>(c.n_kv_heads * capacity * c.head_dim * nbytes));
    cache.values = buffers_[2 * i + 1].reserve(static_cast<size_t>(c.n_kv_heads * capacity * cache.value_stride() * nbytes));
    layers_.push_back(cache);
  }
}

Model::Model(ModelConfig config, int n_threads, const Kernels& kernels)
    : config_(std::move(config)),
      kernels_(kernels),
      pool_(n_threads),
      ropes_(config_.ropes.begin(), config_.ropes.end()),
      layers_(static_cast<size_t>(config_.n_layers())),
      inputs_(config_.activation_bits) {
  scratch_.reserve(kScratchBytes * static_cast<size_t>(n_threads));
  attention_scratch_.reserve_for<float>(attention_scratch(config_.n_heads / config_.n_kv_heads, config_.head_dim) *
                                        n_threads);
}

Model::Rows Model::rows(Buffer& buffer, int64_t n, int64_t width) {
  return {buffer.reserve_for<float>(n * padded(width)), padded(width)};
}

void Model::embed(int32_t token, float* out) const {
  std::fill(out, out + padded(embedding.weight.n_columns), 0.0f);
  dequantize_row(embedding.weight, token, out);
  scale(out, config_.embedding_scale, embedding.weight.n_columns);
}

void Model::multiply(const std::vector<Product>& products, Part part) {
  const Stopwatch::Lap lap(stopwatch, part);
  int64_t n_tiles = 0;
  for (const Product& p : products) n_tiles += p.linear->weight.n_tiles();
  // Whole fours of tiles suit the kernels. Long chunks first, as a thread then streams through memory; the rest by fours,
  // which evens out a busy core.
  const int64_t chunk = pad_to(n_tiles / (pool_.n_threads() * 8) + 1, 4);
  const int64_t n_long = n_tiles * 3 / 4 / chunk, rest = n_long * chunk;
  pool_.run(n_long + (n_tiles - rest + 3) / 4, [&](int64_t task, int thread) {
    char* scratch = scratch_.as<char>() + kScratchBytes * static_cast<size_t>(thread);
    const int64_t begin = task < n_long ? task * chunk : rest + (task - n_long) * 4;
    const int64_t end = std::min(n_tiles, begin + (task < n_long ? chunk : 4));
    int64_t first = 0;
    for (const Product& p : products) {
      const int64_t n = p.linear->weight.n_tiles();
      const int64_t from = std::max(begin, first), to = std::min(end, first + n);
      if (from < to) {
        inputs_.multiply(kernels_, p.linear->weight, p.y.data, p.y.stride, from - first, to - first, scratch);
      }
      first += n;
    }
  });
}

// Runs of a norm that are no multiple of 16 long go through a buffer of their own: what lies behind one is the next.
void Model::normalize(const Norm& norm, const float* x, int64_t n, float* out) const {
  if (norm.n % kTileRows == 0 || norm.n == n) {
    for (int64_t i = 0; i < n; i += norm.n) {
      kernels_.rmsnorm(x + i, norm.weight.data(), config_.norm_eps, norm.n, out + i);
    }
    return;
  }
  std::vector<float> run(norm.weight.size(), 0.0f);
  for (int64_t i = 0; i < n; i += norm.n) {
    std::copy_n(x + i, norm.n, run.data());
    kernels_.rmsnorm(run.data(), norm.weight.data(), config_.norm_eps, norm.n, run.data());
    std::copy_n(run.data(), norm.n, out + i);
  }
}

// Row m as the products of a branch read it.
void Model::branch_off(const Run& run, const Norm& norm, int64_t m) {
  float* row = run.normed[m];
  norm.n > 0 ? normalize(norm, run.x[m], config_.hidden_size, row) : (void)std::copy_n(run.x[m], run.x.stride, row);
  inputs_.put(kernels_, row, m);
}

// Add row m of a branch's output to the hidden rows. last: the branch's last matrix.
void Model::join(const Run& run, const Linear& last, const Norm& norm, int64_t m) {
  float* row = run.out[m];
  add_bias(row, last);
  if (norm.n > 0) normalize(norm, row, config_.hidden_size, row);
  scale(row, config_.residual_scale, run.out.stride);
  add(run.x[m], row, run.x.stride);
}

void Model::run_layer(int64_t i, Session& session, int64_t n, float* x, const Capture& capture) {
  const Layer& layer = layers_[i];
  const int64_t hidden = config_.hidden_size;
  const Run run{layer, n, {x, padded(hidden)}, rows(normed_, n, hidden), rows(out_, n, hidden)};
  const bool routed = !layer.experts.empty();

  attend(run, config_.layers[i], session, session.cache(i), capture);
  if (capture.until == Until::kAttentionInputs) return;

  const FeedForward& f = layer.mlp;
  inputs_.plan(n, hidden, {&(routed ? layer.router : f.gate_up.is_there() ? f.gate_up : f.gate).weight, &f.up.weight});
  pool_.run(n, [&](int64_t m, int) {
    join(run, layer.o, layer.attention_out_norm, m);
    branch_off(run, layer.mlp_norm, m);
  });
  copy_rows(capture.gate_up, run.normed.data, n * run.normed.stride);
  if (capture.until == Until::kFeedForwardInputs) return;
  routed ? route(run) : feed_forward(f, n, run.out, capture.down);
  pool_.run(n, [&](int64_t m, int) { join(run, f.down, layer.mlp_out_norm, m); });
}

void Model::attend(const Run& run, const LayerConfig& c, Session& session, const KvCache& cache, const Capture& capture) {
  const Layer& layer = run.layer;
  const int64_t n = run.n, n_heads = config_.n_heads, n_kv_heads = config_.n_kv_heads, head_dim = config_.head_dim;
  const int64_t n_group = n_heads / n_kv_heads, start = session.n_tokens;
  const int64_t q_width = n_heads * head_dim, kv_width = n_kv_heads * head_dim;
  const AttentionRule rule{config_.attention_scale, config_.attention_softcap,
                           layer.sinks.empty() ? nullptr : layer.sinks.data()};
  Rope* const rope = c.rope < 0 ? nullptr : &ropes_[c.rope + session.rope_offset];
  if (rope != nullptr) rope->extend(start + n);

  // 1. queries, keys and values
  const bool fused = layer.qkv.is_there();
  inputs_.plan(n, config_.hidden_size, {&(fused ? layer.qkv : layer.q).weight, &layer.k.weight, &layer.v.weight});
  pool_.run(n, [&](int64_t m, int) { branch_off(run, layer.attention_norm, m); });
  copy_rows(capture.qkv, run.normed.data, n * run.normed.stride);
  if (capture.until == Until::kAttentionInputs) return;
  Rows q, k, v;
  if (fused) {
    q = rows(qkv_, n, q_width + 2 * kv_width);
    k = {q.data + q_width, q.stride};
    v = {k.data + kv_width, q.stride};
    multiply({{&layer.qkv, q}});
  } else {
    q = rows(q_, n, q_width);
    k = rows(k_, n, kv_width);
    v = rows(v_, n, kv_width);
    multiply({{&layer.q, q}, {&layer.k, k}, {&layer.v, v}});
  }
  pool_.run(n, [&](int64_t m, int) {
    add_bias(q[m], fused ? layer.qkv : layer.q);
    add_bias(k[m], layer.k);
    add_bias(v[m], layer.v);
    if (layer.q_norm.n > 0) normalize(layer.q_norm, q[m], q_width, q[m]);
    if (layer.k_norm.n > 0) normalize(layer.k_norm, k[m], kv_width, k[m]);
    if (rope != nullptr) rope->rotate(q[m], n_heads, head_dim, start + m);
    if (rope != nullptr) rope->rotate(k[m], n_kv_heads, head_dim, start + m);
    kernels_.store_kv(cache, start + m, k[m], v[m]);
  });

  // 2. each query head over the keys of its KV head
  const Rows attended = rows(attended_, n, q_width);
  const int64_t scratch_size = attention_scratch(n_group, head_dim);
  {
    const Stopwatch::Lap lap(stopwatch, Part::kAttention);
    pool_.run(n * n_kv_heads, [&](int64_t task, int thread) {
      const int64_t m = task / n_kv_heads, head = task % n_kv_heads, position = start + m;
      const int64_t first = c.window > 0 ? std::max<int64_t>(0, position - c.window + 1) : 0;
      const int64_t at = head * n_group * head_dim;
      kernels_.attention(cache, head, n_group, first, position, rule, q[m] + at, attended[m] + at,
                         attention_scratch_.as<float>() + scratch_size * thread);
    });
  }

  // 3. their output
  inputs_.plan(n, q_width, {&layer.o.weight});
  pool_.run(n, [&](int64_t m, int) {
    std::fill(attended[m] + q_width, attended[m] + attended.stride, 0.0f);
    inputs_.put(kernels_, attended[m], m);
  });
  copy_rows(capture.o, attended.data, n * attended.stride);
  multiply({{&layer.o, run.out}});
}

// out = down(activation(gate, up)) of the rows in inputs_, without the bias of down.
void Model::feed_forward(const FeedForward& f, int64_t n, Rows out, float* capture_down) {
  const int64_t inner = f.down.weight.n_columns;
  const Rows gate = rows(gate_, n, inner), up = rows(up_, n, inner);
  Rows fused{};
  if (f.gate_up.is_there()) {
    fused = rows(gate_up_, n, 2 * inner);
    multiply({{&f.gate_up, fused}});
  } else {
    multiply({{&f.gate, gate}, {&f.up, up}});
  }
  inputs_.plan(n, inner, {&f.down.weight});
  pool_.run(n, [&](int64_t m, int) {
    activate(f, fused, gate, up, m);
    inputs_.put(kernels_, gate[m], m);
  });
  copy_rows(capture_down, gate.data, n * gate.stride);
  multiply({{&f.down, out}});
}

// gate[m] = activation(gate, up) of row m, zeros behind it.
void Model::activate(const FeedForward& f, Rows fused, Rows gate, Rows up, int64_t m) {
  const int64_t inner = f.down.weight.n_columns;
  float *g = gate[m], *u = up[m];
  if (fused.data != nullptr) {
    const float* row = fused[m];
    add_bias(fused[m], f.gate_up);
    const int64_t step = config_.interleaved ? 2 : 1, second = config_.interleaved ? 1 : inner;
    for (int64_t i = 0; i < inner; i++) {
      g[i] = row[i * step];
      u[i] = row[i * step + second];
    }
    std::fill(g + inner, g + gate.stride, 0.0f);
    std::fill(u + inner, u + up.stride, 0.0f);
  }
  add_bias(g, f.gate);
  add_bias(u, f.up);
  kernels_.gated(config_.activation, g, u, gate.stride, g);
  std::fill(g + inner, g + gate.stride, 0.0f);
}

// A mixture of experts: each token goes to the experts of the highest router scores (the first of equal ones). Their
// outputs are added in the order of the experts, whatever tokens run together.
void Model::route(const Run& run) {
  const Layer& layer = run.layer;
  const auto n_experts = static_cast<int64_t>(layer.experts.size());
  const int64_t n_chosen = config_.n_experts_per_token;
  const Rows scores = rows(scores_, run.n, n_experts);
  multiply({{&layer.router, scores}});
  std::vector<std::vector<std::pair<int64_t, float>>> tokens(static_cast<size_t>(n_experts));  // (token, weight)
  std::vector<int64_t> order(static_cast<size_t>(n_experts));
  for (int64_t m = 0; m < run.n; m++) {
    float* score = scores[m];
    add_bias(score, layer.router);
    for (int64_t e = 0; e < n_experts; e++) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
    kernels_.softmax(score, n_experts, score);
    float total = 0;
    for (int64_t i = 0; i < n_chosen; i++) total += score[order[i]];
    for (int64_t i = 0; i < n_chosen; i++) {
      tokens[order[i]].emplace_back(m, config_.renormalized ? score[order[i]] / total : score[order[i]]);
    }
  }
  std::fill_n(run.out.data, run.n * run.out.stride, 0.0f);
  for (int64_t e = 0; e < n_experts; e++) {
    const auto n = static_cast<int64_t>(tokens[e].size());
    if (n == 0) continue;
    const FeedForward& f = layer.experts[e];
    const Rows out = rows(expert_out_, n, config_.hidden_size);
    inputs_.plan(n, config_.hidden_size, {&(f.gate_up.is_there() ? f.gate_up : f.gate).weight, &f.up.weight});
    pool_.run(n, [&](int64_t i, int) { inputs_.put(kernels_, run.normed[tokens[e][i].first], i); });
    feed_forward(f, n, out, nullptr);
    pool_.run(n, [&](int64_t i, int) {
      const auto [m, weight] = tokens[e][i];
      add_bias(out[i], f.down);
      for (int64_t j = 0; j < out.stride; j++) run.out[m][j] += weight * out[i][j];
    });
  }
}

void Model::forward(Session& session, const int32_t* tokens, int64_t n, bool all_logits, float* logits) {
  const Stopwatch::Lap lap(stopwatch, Part::kRest);
  const ModelConfig& c = config_;
  const Rows x = rows(hidden_, n, c.hidden_size);
  pool_.run(n, [&](int64_t m, int) { embed(tokens[m], x[m]); });
  for (int64_t i = 0; i < c.n_layers(); i++) run_layer(i, session, n, x.data);
  session.n_tokens += n;
  const int64_t n_out = all_logits ? n : 1;
  finish(x[n - n_out], n_out, logits);
}

void Model::finish(const float* x, int64_t n, float* logits) {
  const ModelConfig& c = config_;
  const Linear& output = head.is_there() ? head : embedding;
  const Rows normed = rows(normed_, n, c.hidden_size), scores = rows(logits_, n, c.vocab_size);
  inputs_.plan(n, c.hidden_size, {&output.weight});
  pool_.run(n, [&](int64_t m, int) {
    normalize(final_norm, x + m * padded(c.hidden_size), c.hidden_size, normed[m]);
    inputs_.put(kernels_, normed[m], m);
  });
  multiply({{&output, scores}}, Part::kHead);
  pool_.run(n, [&](int64_t m, int) {
    float* const row = scores[m];
    for (int64_t i = 0; c.logits_divisor != 1 && i < c.vocab_size; i++) row[i] /= c.logits_divisor;
    if (c.final_softcap > 0) kernels_.softcap(row, scores.stride, c.final_softcap);
    std::copy_n(row, c.vocab_size, logits + m * c.vocab_size);
  });
}

}  // namespace w4conv
