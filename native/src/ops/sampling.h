// Tokens chosen from logits (docs/numerics.md 8).
#pragma once
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/buffer.h"
#include "w4conv/kernels.h"

namespace w4conv {

struct SamplerConfig {
  float temperature = 0;                        // 0: the largest logit
  int64_t top_k = 0;                            // 0: all
  double top_p = 1;                             // 1: all
  float min_p = 0;                              // 0: all
  uint64_t seed[2] = {}, choice = 0;            // of the random numbers
  float repetition = 1;                         // a factor; 1: none
  float presence = 0, frequency = 0;            // taken off; 0: none
  std::vector<std::pair<int32_t, float>> bias;  // added to the logits of these tokens
};

// Memory of one thread that samples.
struct SamplerScratch {
  Buffer logits, weights, peaks, sums, candidates, left;
};

// What stands in place of a token id.
constexpr int32_t kNotANumber = -1;  // a logit is NaN or +infinity
constexpr int32_t kNoToken = -2;     // every logit is -infinity

// The choices of one sequence, token after token.
class Sampler {
 public:
  explicit Sampler(SamplerConfig config) : config_(std::move(config)) {}

  // Tokens of the prompt.
  void see(const int32_t* tokens, int64_t n);
  // The token that follows them, of logits [n]; or what stands in its place. `accept` then counts it.
  int32_t choose(const Kernels& kernels, const float* logits, int64_t n, SamplerScratch& scratch) const;
  void accept(int32_t token);

 private:
  bool counts() const { return config_.repetition != 1 || config_.presence != 0 || config_.frequency != 0; }
  void change(float* logits, int64_t n) const;

  SamplerConfig config_;
  uint64_t position_ = 0;                      // of the next token in the sequence
  std::unordered_map<int32_t, int32_t> seen_;  // token -> how often the answer has it; 0 for one of the prompt alone
};

// Word 0 of Philox4x64-10 (Salmon et al., 2011) of counter (position, choice, 0, 0).
uint64_t random_word(const uint64_t (&key)[2], uint64_t position, uint64_t choice);

// The largest of n logits, the first token that has it, and the sum of the whole weights at temperature 1. token: or what
// stands in its place.
struct LogSum {
  float top;
  int32_t token;
  uint64_t sum;
};
LogSum log_sum(const Kernels& kernels, const float* logits, int64_t n, SamplerScratch& scratch);

// The ids of the k <= n largest logits, in falling order; of equal ones the lower id is first. No logit is NaN.
void largest(const Kernels& kernels, const float* logits, int64_t n, int64_t k, int32_t* ids, SamplerScratch& scratch);

}  // namespace w4conv
