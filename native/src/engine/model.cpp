#include "engine/model.h"

#include <algorithm>
#include <cmath>

namespace w4conv {
namespace {

int64_t padded(int64_t n) { return pad_to(n, kTileRows); }

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += y[i];
}
// The part of a bias that belongs to rows of the weight from `begin` on; null where there is none.
const float* bias_from(const Linear& linear, int64_t begin) {
  return linear.bias.empty() ? nullptr : linear.bias.data() + begin;
}
void add_bias(float* x, const float* bias, int64_t n) {
  if (bias != nullptr) add(x, bias, n);
}
void add_bias(float* x, const Linear& linear) { add_bias(x, bias_from(linear, 0), linear.weight.n_rows); }

void copy_rows(float* to, const float* from, int64_t n) {
  if (to != nullptr) std::copy_n(from, n, to);
}
void scale(float* x, float factor, int64_t n) {
  if (factor == 1) return;
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

// A layer's cache, its buffers still to come.
KvCache cache_of(const ModelConfig& c, int64_t layer, const KvConfig& kv) {
  KvCache cache{.n_kv_heads = c.n_kv_heads, .head_dim = c.head_dim, .kind = kv.kind, .window = c.layers[layer].window};
  if (kv.window > 0 && (cache.window == 0 || cache.window > kv.window)) {
    cache.window = kv.window;
    cache.n_sink_keys = kKeyTile;
  }
  cache.n_slots = pad_to(kv.n_positions, kSplitKeys);
  if (cache.window > 0) {  // a pass stores all its tokens before the first of them reads the keys
    cache.n_slots = std::min(cache.n_slots, pad_to(cache.n_sink_keys + cache.window - 1 + Model::kMaxTokens, kSplitKeys));
  }
  return cache;
}

struct KvSizes {
  size_t keys, values, scales;  // bytes; scales: of the keys, and again of the values
  KvSizes(const KvCache& c, int64_t n_slots) {
    const int64_t n = c.n_kv_heads * n_slots;
    keys = static_cast<size_t>(n * c.head_dim * kv_nbytes(c.kind));
    values = static_cast<size_t>(n * c.value_stride() * kv_nbytes(c.kind));
    scales = c.kind == KvKind::kInt8 ? static_cast<size_t>(n) * sizeof(float) : 0;
  }
};

// The tiles of a GEMM as tasks (guided self-scheduling): in rounds of one chunk for each thread, every round a third of what
// is left. So chunks
// are long at first, as a thread then streams through memory, and short at last, which evens out a busy core. Whole fours
// of tiles suit the kernels.
struct GuidedSchedule {
  int64_t n_tiles;
  int n_threads;

  int64_t n_tasks() const {
    int64_t n = 0;
    for (int64_t begin = 0; begin < n_tiles; begin += n_threads * chunk(begin)) n += n_threads;
    return n;
  }
  // The first one of a task and the one behind its last; the last round may have none left for some threads.
  std::pair<int64_t, int64_t> tiles(int64_t task) const {
    int64_t begin = 0;
    for (; task >= n_threads; task -= n_threads) begin += n_threads * chunk(begin);
    const int64_t first = begin + task * chunk(begin);
    return {std::min(n_tiles, first), std::min(n_tiles, first + chunk(begin))};
  }

 private:
  int64_t chunk(int64_t begin) const { return pad_to((n_tiles - begin) / (3 * n_threads) + 1, 4); }
};

}  // namespace

Session::Session(const ModelConfig& c, const KvConfig& kv)
    : n_positions_(kv.n_positions),
      buffers_(static_cast<size_t>(4 * c.n_layers())),
      n_reserved_(static_cast<size_t>(c.n_layers())) {
  for (int64_t i = 0; i < c.n_layers(); i++) layers_.push_back(cache_of(c, i, kv));
}

// Slots lie one split after another, so that more of them are more bytes at the end. Untouched memory costs nothing: begin
// with a huge page of keys, then double, so that what is copied stays a small part of what tokens read.
const KvCache& Session::reserve(int64_t layer, int64_t n) {
  KvCache& cache = layers_[layer];
  const int64_t needed = std::min(cache.n_slots, pad_to(n, kSplitKeys)), have = n_reserved_[layer];
  if (needed <= have) return cache;
  const auto first = static_cast<int64_t>(Buffer::kHugePage / KvSizes(cache, kSplitKeys).keys) * kSplitKeys;
  const int64_t n_slots = std::min(cache.n_slots, std::max({needed, 2 * have, first}));
  const KvSizes sizes(cache, n_slots);
  Buffer* const buffers = &buffers_[4 * layer];
  cache.keys = buffers[0].grow_filling(sizes.keys);
  cache.values = buffers[1].grow_filling(sizes.values);
  if (sizes.scales > 0) {
    cache.key_scales = static_cast<float*>(buffers[2].grow_filling(sizes.scales));
    cache.value_scales = static_cast<float*>(buffers[3].grow_filling(sizes.scales));
  }
  n_reserved_[layer] = n_slots;
  return cache;
}

int64_t Session::nbytes(const ModelConfig& c, const KvConfig& kv) {
  size_t total = 0;
  for (int64_t i = 0; i < c.n_layers(); i++) {
    const KvCache cache = cache_of(c, i, kv);
    const KvSizes sizes(cache, cache.n_slots);
    total += sizes.keys + sizes.values + 2 * sizes.scales;
  }
  return static_cast<int64_t>(total);
}

void Session::advance(int64_t n) {
  n_tokens_ += n;
  n_stored_ = std::max(n_stored_, n_tokens_);
}

bool Session::truncate(int64_t n) {
  if (n == 0) n_stored_ = 0;
  for (const KvCache& cache : layers_) {  // what the next token sees, whose position is n
    if (n > 0 && n_stored_ > cache.n_slots && cache.first(n) + cache.n_slots - cache.n_sink_keys < n_stored_) return false;
  }
  n_tokens_ = n;
  return true;
}

Model::Model(ModelConfig config, int n_threads, const Kernels& kernels)
    : config_(std::move(config)),
      kernels_(kernels),
      pool_(n_threads),
      ropes_(config_.ropes.begin(), config_.ropes.end()),
      layers_(static_cast<size_t>(config_.n_layers())),
      inputs_(config_.activation_bits) {
  scratch_.reserve(kScratchBytes * static_cast<size_t>(n_threads));
  attention_scratch_.reserve_for<float>(kAttentionScratch * n_threads);
}

Model::Rows Model::rows(Buffer& buffer, int64_t n, int64_t width) {
  return {buffer.reserve_for<float>(n * padded(width)), padded(width)};
}

void Model::embed(int32_t token, float* out) const {
  std::fill(out, out + padded(embedding.weight.n_columns), 0.0f);
  kernels_.dequantize_row(embedding.weight, token, out);
  scale(out, config_.embedding_scale, embedding.weight.n_columns);
}

void Model::multiply(const std::vector<Gemm>& gemms, Part part) {
  const Stopwatch::Lap lap(stopwatch, part);
  int64_t n_tiles = 0;
  for (const Gemm& g : gemms) n_tiles += g.linear->weight.n_tiles();
  const GuidedSchedule schedule{n_tiles, pool_.n_threads()};
  pool_.run(schedule.n_tasks(), [&](int64_t task, int thread) {
    char* scratch = scratch_.as<char>() + kScratchBytes * static_cast<size_t>(thread);
    const auto [begin, end] = schedule.tiles(task);
    int64_t first = 0;
    for (const Gemm& g : gemms) {
      const int64_t n = g.linear->weight.n_tiles();
      const int64_t from = std::max(begin, first), to = std::min(end, first + n);
      if (from < to) {
        inputs_.multiply(kernels_, g.linear->weight, g.y.data, g.y.stride, from - first, to - first, scratch);
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

// Row m, normalized, as the GEMMs of a block read it.
void Model::pre_norm(const Run& run, const Norm& norm, int64_t m) {
  float* row = run.normed[m];
  norm.n > 0 ? normalize(norm, run.x[m], config_.hidden_size, row) : (void)std::copy_n(run.x[m], run.x.stride, row);
  inputs_.put(kernels_, row, m);
}

// Add row m of a block's output to the residual stream. last: the block's last matrix.
void Model::residual_add(const Run& run, const Linear& last, const Norm& norm, int64_t m) {
  float* row = run.out[m];
  add_bias(row, last);
  if (norm.n > 0) normalize(norm, row, config_.hidden_size, row);
  scale(row, config_.residual_scale, run.out.stride);
  add(run.x[m], row, run.x.stride);
}

// x += attention(norm(x)); x += feed_forward(norm(x)). Hooks take copies on the way, or end it there.
void Model::run_layer(int64_t i, Session& session, int64_t n, float* x, const Capture& capture) {
  const Layer& layer = layers_[i];
  const FeedForward& mlp = layer.mlp;
  const int64_t hidden = config_.hidden_size;
  const Run run{layer, n, {x, padded(hidden)}, rows(normed_, n, hidden), rows(out_, n, hidden)};

  if (capture.from == From::kDown) {
    multiply_rows(mlp.down, {capture.down, padded(mlp.down.weight.n_columns)}, n, run.out);
    each_token(n, [&](int64_t m) { residual_add(run, mlp.down, layer.mlp_out_norm, m); });
    return;
  }
  if (capture.from == From::kStart) {
    attention_block(run, config_.layers[i], session, session.reserve(i, session.n_tokens() + n), capture);
    if (capture.until == Until::kAttentionInputs) return;
  } else if (capture.from == From::kOutput) {
    multiply_rows(layer.o, {capture.o, padded(layer.o.weight.n_columns)}, n, run.out);
  }

  const bool routed = !layer.experts.empty();
  const Linear& first = routed ? layer.router : mlp.gate_up.is_defined() ? mlp.gate_up : mlp.gate;
  inputs_.plan(n, hidden, {&first.weight, &mlp.up.weight});
  each_token(n, [&](int64_t m) {
    if (capture.from != From::kFeedForward) residual_add(run, layer.o, layer.attention_out_norm, m);
    pre_norm(run, layer.mlp_norm, m);
  });
  copy_rows(capture.gate_up, run.normed.data, n * run.normed.stride);
  if (capture.until == Until::kFeedForwardInputs) return;
  routed ? mixture_of_experts(run) : feed_forward(mlp, n, run.out, capture.down);
  each_token(n, [&](int64_t m) { residual_add(run, mlp.down, layer.mlp_out_norm, m); });
}

// run.out = attention of the normalized rows, without the bias of o.
void Model::attention_block(const Run& run, const LayerConfig& c, Session& session, const KvCache& cache,
                            const Capture& capture) {
  const Layer& layer = run.layer;
  const int64_t n = run.n, n_heads = config_.n_heads, n_kv_heads = config_.n_kv_heads, head_dim = config_.head_dim;
  const int64_t start = session.n_tokens();
  const int64_t q_width = n_heads * head_dim, kv_width = n_kv_heads * head_dim;
  AttentionRule rule{config_.attention_scale, config_.attention_softcap, layer.sinks.empty() ? nullptr : layer.sinks.data()};
  Rope* const rope = c.rope < 0 ? nullptr : &ropes_[c.rope + session.rope_offset];
  if (rope != nullptr) rope->extend(start + n);

  // 1. pre-norm; queries, keys and values
  const bool fused = layer.qkv.is_defined();
  // A bias may be far larger than the rest of a key, of which 8 bits would leave nothing: it is not stored but counted in.
  const float* const key_bias = fused ? bias_from(layer.qkv, q_width) : bias_from(layer.k, 0);
  const bool apart = key_bias != nullptr && cache.kind == KvKind::kInt8 && rope != nullptr && layer.k_norm.n == 0;
  if (apart) {
    rule.cos_sin = rope->cos_sin_tiles(head_dim);
    rule.n_bias_terms = rope->n_bias_terms(head_dim);
  }
  inputs_.plan(n, config_.hidden_size, {&(fused ? layer.qkv : layer.q).weight, &layer.k.weight, &layer.v.weight});
  each_token(n, [&](int64_t m) { pre_norm(run, layer.attention_norm, m); });
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
  each_token(n, [&](int64_t m) {
    add_bias(q[m], bias_from(fused ? layer.qkv : layer.q, 0), q_width);
    if (!apart) add_bias(k[m], key_bias, kv_width);
    add_bias(v[m], fused ? bias_from(layer.qkv, q_width + kv_width) : bias_from(layer.v, 0), kv_width);
    if (layer.q_norm.n > 0) normalize(layer.q_norm, q[m], q_width, q[m]);
    if (layer.k_norm.n > 0) normalize(layer.k_norm, k[m], kv_width, k[m]);
    if (rope != nullptr) rope->rotate(q[m], n_heads, head_dim, start + m);
    if (rope != nullptr) rope->rotate(k[m], n_kv_heads, head_dim, start + m);
    kernels_.store_kv(cache, start + m, k[m], v[m]);
  });

  // 2. attention of each query head over the keys of its KV head
  const Rows attended = rows(attended_, n, q_width);
  {
    const Stopwatch::Lap lap(stopwatch, Part::kAttention);
    attention(cache, rule, {rope, apart ? key_bias : nullptr}, q, start, n, attended);
  }

  // 3. the output projection
  inputs_.plan(n, q_width, {&layer.o.weight});
  each_token(n, [&](int64_t m) {
    std::fill(attended[m] + q_width, attended[m] + attended.stride, 0.0f);
    inputs_.put(kernels_, attended[m], m);
  });
  copy_rows(capture.o, attended.data, n * attended.stride);
  multiply({{&layer.o, run.out}});
}

// out = linear(x), without its bias. x: padded with zeros.
void Model::multiply_rows(const Linear& linear, Rows x, int64_t n, Rows out) {
  inputs_.plan(n, linear.weight.n_columns, {&linear.weight});
  each_token(n, [&](int64_t m) { inputs_.put(kernels_, x[m], m); });
  multiply({{&linear, out}});
}

// Attention of the queries q of n tokens from position start on. The queries of a KV head and of some tokens are a block:
// they read each KV split together. Where blocks are few, threads share out their splits too (flash decoding).
void Model::attention(const KvCache& cache, const AttentionRule& rule, const KeyBias& bias, Rows q, int64_t start, int64_t n,
                      Rows out) {
  constexpr int64_t kBlockRows = 4 * kTokenGroup;
  const int64_t n_kv_heads = config_.n_kv_heads, n_group = config_.n_heads / n_kv_heads, d = config_.head_dim;
  const int64_t block_tokens = std::max<int64_t>(1, kBlockRows / n_group);
  const int64_t n_jobs = (n + block_tokens - 1) / block_tokens * n_kv_heads;
  const int64_t first_split = cache.first(start) / kSplitKeys, n_sink_splits = cache.n_sink_keys > 0 && first_split > 0;
  const int64_t n_splits = (start + n - 1) / kSplitKeys + 1 - first_split + n_sink_splits;
  const bool shared = n_splits > 1 && n_jobs < 4 * pool_.n_threads();

  const int64_t block_size = block_tokens * n_group * (d + rule.n_bias_terms);
  float* const packed = queries_.reserve_for<float>(n_jobs * block_size);
  const int64_t sums_size = SplitSums::size(block_tokens * n_group, cache.value_stride());
  float* const splits = splits_.reserve_for<float>((shared ? n_jobs : pool_.n_threads()) * n_splits * sums_size);

  struct Job {
    int64_t head, token;
    Queries queries;
  };
  const auto job_at = [&](int64_t i) {
    const int64_t token = i / n_kv_heads * block_tokens, n_tokens = std::min(block_tokens, n - token);
    const int64_t n_rows = n_tokens * n_group;
    float* const values = packed + i * block_size;
    return Job{i % n_kv_heads, token, {values, values + n_rows * d, n_rows, n_group, start + token}};
  };
  const auto row_of = [&](const Job& job, Rows rows, int64_t row) {
    return rows[job.token + row / n_group] + (job.head * n_group + row % n_group) * d;
  };
  const auto pack = [&](int64_t i) {
    const Job job = job_at(i);
    float* const to = packed + i * block_size;
    for (int64_t row = 0; row < job.queries.n_rows; row++) {
      const float* const from = row_of(job, q, row);
      for (int64_t j = 0; j < d; j++) to[j * job.queries.n_rows + row] = from[j];
      if (bias.values == nullptr) continue;
      bias.rope->bias_terms(from, bias.values + job.head * d, d, to + d * job.queries.n_rows + row, job.queries.n_rows);
    }
  };
  const auto attention_split = [&](int64_t i, int64_t slot, int64_t split, int thread) {
    const Job job = job_at(i);
    const int64_t n_rows = job.queries.n_rows, stride = cache.value_stride();
    float* const sums = splits + slot * n_splits * sums_size + split * SplitSums::size(n_rows, stride);
    const int64_t number = split < n_sink_splits ? 0 : first_split + split - n_sink_splits;
    kernels_.attention_split(cache, job.head, job.queries, number, rule, {sums, n_rows, stride},
                             attention_scratch_.as<float>() + kAttentionScratch * thread);
  };
  const auto merge = [&](int64_t i, int64_t slot) {
    const Job job = job_at(i);
    std::vector<float*> to(static_cast<size_t>(job.queries.n_rows));
    for (int64_t row = 0; row < job.queries.n_rows; row++) to[row] = row_of(job, out, row);
    kernels_.merge_splits(cache, job.head, job.queries, rule, splits + slot * n_splits * sums_size, n_splits, to.data());
  };
  if (shared) {
    pool_.run(n_jobs, [&](int64_t i, int) { pack(i); });
    pool_.run(n_jobs * n_splits,
              [&](int64_t task, int thread) { attention_split(task / n_splits, task / n_splits, task % n_splits, thread); });
    pool_.run(n_jobs, [&](int64_t i, int) { merge(i, i); });
  } else {
    pool_.run(n_jobs, [&](int64_t i, int thread) {
      pack(i);
      for (int64_t split = 0; split < n_splits; split++) attention_split(i, thread, split, thread);
      merge(i, thread);
    });
  }
}

// out = down(activation(gate, up)) of the rows in inputs_, without the bias of down.
void Model::feed_forward(const FeedForward& f, int64_t n, Rows out, float* capture_down) {
  const int64_t inner = f.down.weight.n_columns;
  const Rows gate = rows(gate_, n, inner), up = rows(up_, n, inner);
  Rows fused{};
  if (f.gate_up.is_defined()) {
    fused = rows(gate_up_, n, 2 * inner);
    multiply({{&f.gate_up, fused}});
  } else {
    multiply({{&f.gate, gate}, {&f.up, up}});
  }
  inputs_.plan(n, inner, {&f.down.weight});
  each_token(n, [&](int64_t m) {
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
void Model::mixture_of_experts(const Run& run) {
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
    inputs_.plan(n, config_.hidden_size, {&(f.gate_up.is_defined() ? f.gate_up : f.gate).weight, &f.up.weight});
    each_token(n, [&](int64_t i) { inputs_.put(kernels_, run.normed[tokens[e][i].first], i); });
    feed_forward(f, n, out, nullptr);
    each_token(n, [&](int64_t i) {
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
  each_token(n, [&](int64_t m) { embed(tokens[m], x[m]); });
  for (int64_t i = 0; i < c.n_layers(); i++) run_layer(i, session, n, x.data);
  session.advance(n);
  if (logits == nullptr) return;
  const int64_t n_out = all_logits ? n : 1;
  finish(x[n - n_out], n_out, logits);
}

void Model::finish(const float* x, int64_t n, float* logits) {
  const ModelConfig& c = config_;
  const Linear& output = head.is_defined() ? head : embedding;
  const Rows normed = rows(normed_, n, c.hidden_size), scores = rows(logits_, n, c.vocab_size);
  inputs_.plan(n, c.hidden_size, {&output.weight});
  each_token(n, [&](int64_t m) {
    normalize(final_norm, x + m * padded(c.hidden_size), c.hidden_size, normed[m]);
    inputs_.put(kernels_, normed[m], m);
  });
  multiply({{&output, scores}}, Part::kHead);
  each_token(n, [&](int64_t m) {
    float* const row = scores[m];
    for (int64_t i = 0; c.logits_divisor != 1 && i < c.vocab_size; i++) row[i] /= c.logits_divisor;
    if (c.final_softcap > 0) kernels_.softcap(row, scores.stride, c.final_softcap);
    std::copy_n(row, c.vocab_size, logits + m * c.vocab_size);
  });
}

}  // namespace w4conv
