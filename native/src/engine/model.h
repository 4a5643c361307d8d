// The forward pass of a decoder-only transformer of the Llama shape, on weights that stay where they are mapped.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/buffer.h"
#include "engine/inputs.h"
#include "engine/pool.h"
#include "engine/rope.h"
#include "w4conv/kernels.h"

namespace w4conv {

struct ModelConfig {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, n_layers = 0;
  int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0;
  float norm_eps = 0;
  std::vector<float> inverse_frequencies;  // head_dim / 2
  std::vector<int64_t> windows;            // one a layer, 0 = none; or empty
};

struct Linear {
  Matrix weight;
  std::vector<float> bias;  // padded rows, or empty
};

struct Layer {
  std::vector<float> input_norm, post_norm;  // padded rows
  Linear q, k, v, o, gate, up, down;
};

// Keys and values of one sequence.
class Session {
 public:
  Session(const ModelConfig& config, int64_t n_positions, bool wide);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int64_t n_tokens = 0;
  int64_t n_positions() const { return n_positions_; }
  const KvCache& cache(int64_t layer) const { return layers_[layer]; }

 private:
  int64_t n_positions_;
  std::vector<Buffer> buffers_;
  std::vector<KvCache> layers_;
};

// Where a layer puts a copy of the rows that its products read: n rows each, padded to 16 floats. Null: not wanted.
struct Capture {
  float* qkv = nullptr;      // hidden_size
  float* o = nullptr;        // n_heads * head_dim
  float* gate_up = nullptr;  // hidden_size
  float* down = nullptr;     // intermediate_size
};

class Model {
 public:
  // Tokens of one pass through the layers; longer inputs are cut by the caller.
  static constexpr int64_t kMaxTokens = w4conv::kMaxTokens;

  // activation_bits: 16, or 8, where products take integers.
  Model(ModelConfig config, int n_threads, const Kernels& kernels, int activation_bits = 16);

  const ModelConfig& config() const { return config_; }
  const Kernels& kernels() const { return kernels_; }
  Layer& layer(int64_t i) { return layers_[i]; }
  Linear embedding, head;
  std::vector<float> final_norm;

  // Append n <= kMaxTokens tokens (ids below vocab_size; room in the session). logits: [n or 1][vocab_size], for all
  // tokens or the last one.
  void forward(Session& session, const int32_t* tokens, int64_t n, bool all_logits, float* logits);

  // One layer on hidden rows x [n][padded hidden_size] of the session's next n <= kMaxTokens positions, in place. The
  // session does not move on: its caller adds n to n_tokens after the last layer.
  void run_layer(int64_t i, Session& session, int64_t n, float* x, const Capture& capture = {});

  // Logits [n][vocab_size] of the hidden rows x [n][padded hidden_size] that the last layer gives, n <= kMaxTokens.
  void finish(const float* x, int64_t n, float* logits);

 private:
  struct Product {
    const Linear* linear;
    float* y;
    int64_t ldy;
  };
  void multiply(std::initializer_list<Product> products);
  void embed(int32_t token, float* out) const;

  ModelConfig config_;
  const Kernels& kernels_;
  Pool pool_;
  Rope rope_;
  std::vector<Layer> layers_;
  Inputs inputs_;
  Buffer hidden_, normed_, q_, k_, v_, attended_, gate_, up_, out_, logits_, scratch_, attention_scratch_;
};

}  // namespace w4conv
