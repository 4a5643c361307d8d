// The forward pass of a decoder-only transformer, on weights that stay where they are mapped.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/buffer.h"
#include "ops/inputs.h"
#include "ops/pool.h"
#include "engine/rope.h"
#include "engine/stopwatch.h"
#include "w4conv/kernels.h"

namespace w4conv {

// What differs from layer to layer.
struct LayerConfig {
  int64_t rope = 0;    // which of ModelConfig::ropes; -1 = none
  int64_t window = 0;  // newest keys that are seen; 0 = all
};

struct ModelConfig {
  int64_t vocab_size = 0, hidden_size = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
  float norm_eps = 0;
  float attention_scale = 1, attention_softcap = 0;
  float embedding_scale = 1, residual_scale = 1;  // factors of the embedding rows, and of each block's output
  float logits_divisor = 1, final_softcap = 0;
  Activation activation = Activation::kSilu;
  bool interleaved = false;  // the rows of a gate_up matrix alternate; else the gate's come first
  int64_t n_experts_per_token = 0;
  bool renormalized = true;  // experts' weights: softmax over the chosen; else over all
  int activation_bits = 16;  // or 8, where GEMMs take integers
  std::vector<RopeFrequencies> ropes;
  std::vector<LayerConfig> layers;
  int64_t n_layers() const { return static_cast<int64_t>(layers.size()); }
};

struct Linear {
  Matrix weight;
  std::vector<float> bias;  // padded rows, or empty
  bool is_defined() const { return weight.lines != nullptr; }
};

// RMSNorm over runs of n values; n = 0: none.
struct Norm {
  int64_t n = 0;
  std::vector<float> weight;  // padded
};

struct FeedForward {
  Linear gate, up, gate_up, down;  // gate and up, or both in gate_up
};

struct Layer {
  Norm attention_norm, attention_out_norm, mlp_norm, mlp_out_norm;  // before a block, and on its output
  Norm q_norm, k_norm;                                              // of each head, or of the whole row
  std::vector<float> sinks;                                         // one a query head, or empty
  Linear q, k, v, qkv, o;                                           // q, k and v, or all in qkv
  FeedForward mlp;
  Linear router;  // with experts: in place of mlp
  std::vector<FeedForward> experts;
};

struct KvConfig {
  int64_t n_positions = 0;
  KvKind kind = KvKind::kF16;
  // Where it is not 0, layers that see more than so many of the newest tokens see these and the first kKeyTile ones.
  int64_t window = 0;
};

// Keys and values of one sequence. A layer with a window holds no more of them than a pass can see. Memory grows with the
// tokens that there are.
class Session {
 public:
  Session(const ModelConfig& config, const KvConfig& kv);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  // Bytes of keys and values once the session is full.
  static int64_t nbytes(const ModelConfig& config, const KvConfig& kv);

  int64_t rope_offset = 0;  // added to the ropes of the layers: the second set of a model that has two
  int64_t n_tokens() const { return n_tokens_; }
  int64_t n_positions() const { return n_positions_; }
  // The cache of a layer with room for the keys of n positions.
  const KvCache& reserve(int64_t layer, int64_t n);

  void advance(int64_t n);
  // Forget all but the first n tokens. False, and nothing done, when other tokens have taken the slots of keys that are
  // seen again then; never for n = 0, nor less than kMaxTokens behind the most tokens that there were.
  bool truncate(int64_t n);

 private:
  int64_t n_positions_, n_tokens_ = 0;
  int64_t n_stored_ = 0;             // the most tokens that there were since the session was empty
  std::vector<Buffer> buffers_;      // keys, values and their scales of each layer
  std::vector<int64_t> n_reserved_;  // slots of each layer that have memory
  std::vector<KvCache> layers_;
};

// From where to where a layer is run. kOutput, kDown: from the inputs of o or mlp.down, which are given; the hidden rows
// that come in are those before the block. kFeedForward: from the hidden rows behind the attention block.
enum class From { kStart, kOutput, kFeedForward, kDown };
enum class Until { kAttentionInputs, kFeedForwardInputs, kEnd };

// The hooks of a layer, where it puts a copy of the rows that its GEMMs read: n rows each, padded to 16 floats. Null: not
// wanted. At kOutput and kDown the rows of that hook are read instead.
struct Capture {
  float* qkv = nullptr;      // hidden_size
  float* o = nullptr;        // n_heads * head_dim
  float* gate_up = nullptr;  // hidden_size; the router's too
  float* down = nullptr;     // inputs of mlp.down
  From from = From::kStart;
  Until until = Until::kEnd;
};

class Model {
 public:
  // Tokens of one pass through the layers; longer inputs are cut by the caller.
  static constexpr int64_t kMaxTokens = w4conv::kMaxTokens;

  Model(ModelConfig config, int n_threads, const Kernels& kernels);

  const ModelConfig& config() const { return config_; }
  const Kernels& kernels() const { return kernels_; }
  Layer& layer(int64_t i) { return layers_[i]; }
  Rope& rope(int64_t i) { return ropes_[i]; }
  Linear embedding, head;
  Norm final_norm;
  Stopwatch stopwatch;

  // Append n <= kMaxTokens tokens (ids below vocab_size; room in the session). logits: [n or 1][vocab_size], for all
  // tokens or the last one; or null.
  void forward(Session& session, const int32_t* tokens, int64_t n, bool all_logits, float* logits);

  // One layer on hidden rows x [n][padded hidden_size] of the session's next n <= kMaxTokens positions, in place. The
  // session does not move on: its caller adds n to n_tokens after the last layer.
  void run_layer(int64_t i, Session& session, int64_t n, float* x, const Capture& capture = {});

  // Logits [n][vocab_size] of the hidden rows x [n][padded hidden_size] that the last layer gives, n <= kMaxTokens.
  void finish(const float* x, int64_t n, float* logits);

 private:
  struct Rows {
    float* data;
    int64_t stride;
    float* operator[](int64_t m) const { return data + m * stride; }
  };
  struct Gemm {
    const Linear* linear;
    Rows y;
  };
  struct Run {  // one layer's n tokens on their way
    const Layer& layer;
    int64_t n;
    Rows x, normed, out;  // hidden rows; normed ones; a block's output
  };
  Rows rows(Buffer& buffer, int64_t n, int64_t width);
  // f(m) for each of n tokens, on several threads. Whole token groups together, as the inputs of GEMMs lie interleaved:
  // two threads in one group would wait for each other's cache lines.
  template <class F>
  void each_token(int64_t n, const F& f) {
    const int64_t step = n > kTokenGroup ? kTokenGroup : 1;
    pool_.run((n + step - 1) / step, [&](int64_t task, int) {
      for (int64_t m = task * step; m < std::min(n, (task + 1) * step); m++) f(m);
    });
  }
  void multiply(const std::vector<Gemm>& gemms, Part part = Part::kGemm);
  void multiply_rows(const Linear& linear, Rows x, int64_t n, Rows out);
  void embed(int32_t token, float* out) const;
  void normalize(const Norm& norm, const float* x, int64_t n, float* out) const;
  void pre_norm(const Run& run, const Norm& norm, int64_t m);
  void residual_add(const Run& run, const Linear& last, const Norm& norm, int64_t m);

  void attention_block(const Run& run, const LayerConfig& c, Session& session, const KvCache& cache, const Capture& capture);
  struct KeyBias {  // of all KV heads, where keys are stored without it; null: they have it, or there is none
    const Rope* rope;
    const float* values;
  };
  void attention(const KvCache& cache, const AttentionRule& rule, const KeyBias& bias, Rows q, int64_t start, int64_t n,
                 Rows out);
  void feed_forward(const FeedForward& f, int64_t n, Rows out, float* capture_down);
  void activate(const FeedForward& f, Rows fused, Rows gate, Rows up, int64_t m);
  void mixture_of_experts(const Run& run);

  ModelConfig config_;
  const Kernels& kernels_;
  Pool pool_;
  std::vector<Rope> ropes_;
  std::vector<Layer> layers_;
  Inputs inputs_;
  Buffer hidden_, normed_, q_, k_, v_, qkv_, attended_, gate_, up_, gate_up_, out_, logits_, scratch_;
  Buffer scores_, expert_out_, attention_scratch_, queries_, splits_;
};

}  // namespace w4conv
