#include "ops/sampling.h"

#include <algorithm>

#include "bindings/bindings.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

using Ids = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMaxVocabulary = int64_t{1} << 22;  // so that sums of whole weights fit

// f(row, scratch) for each row of logits, on several threads.
template <class F>
void each_row(Pool& pool, const FloatRows& logits, const F& f) {
  const auto n_rows = static_cast<int64_t>(logits.shape(0)), n = static_cast<int64_t>(logits.shape(1));
  require(n > 0 && n <= kMaxVocabulary, "logits: rows of 1 to 2^22");
  std::vector<SamplerScratch> scratches(static_cast<size_t>(pool.n_threads()));
  pool.run(n_rows, [&](int64_t row, int thread) { f(row, scratches[static_cast<size_t>(thread)]); });
}

void init_sampler(Sampler* s, float temperature, int64_t top_k, double top_p, float min_p,
                  const std::tuple<uint64_t, uint64_t>& seed, uint64_t choice, float repetition, float presence,
                  float frequency, const Tokens& bias_ids, const Floats& bias) {
  require(temperature >= 0 && top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1, "filters: out of range");
  require(repetition > 0, "repetition: not above 0");
  require(bias_ids.size() == bias.size(), "bias: not one value for each token");
  SamplerConfig c{temperature, top_k,      top_p,    min_p,     {std::get<0>(seed), std::get<1>(seed)},
                  choice,      repetition, presence, frequency, {}};
  for (size_t i = 0; i < bias.size(); i++) {
    require(bias_ids.data()[i] >= 0, "bias: token id below 0");
    c.bias.emplace_back(bias_ids.data()[i], bias.data()[i]);
  }
  new (s) Sampler(std::move(c));
}

void see(Sampler& s, const Tokens& tokens) { s.see(tokens.data(), static_cast<int64_t>(tokens.size())); }

// Ids of [n_rows] tokens, or what stands in their place; then no sampler has moved on.
void choose(Pool& pool, const FloatRows& logits, const std::vector<Sampler*>& samplers, const Ids& out) {
  require(samplers.size() == logits.shape(0) && out.size() == samplers.size(), "not one sampler and id for each row");
  auto distinct = samplers;
  std::sort(distinct.begin(), distinct.end());
  require(std::adjacent_find(distinct.begin(), distinct.end()) == distinct.end(), "a sampler is there twice");
  require(std::find(samplers.begin(), samplers.end(), nullptr) == samplers.end(), "a sampler is None");
  const Kernels& k = kernels();
  const auto n = static_cast<int64_t>(logits.shape(1));
  const WithoutGil without_gil;
  each_row(pool, logits, [&](int64_t row, SamplerScratch& scratch) {
    out.data()[row] = samplers[static_cast<size_t>(row)]->choose(k, logits.data() + row * n, n, scratch);
  });
  if (std::any_of(out.data(), out.data() + out.size(), [](int32_t id) { return id < 0; })) return;
  for (size_t i = 0; i < samplers.size(); i++) samplers[i]->accept(out.data()[i]);
}

void log_sums(Pool& pool, const FloatRows& logits, const MutableFloats& tops, const Ids& tokens, const Sums& sums) {
  const size_t n_rows = logits.shape(0);
  require(tops.size() == n_rows && tokens.size() == n_rows && sums.size() == n_rows, "not one result for each row");
  const Kernels& k = kernels();
  const auto n = static_cast<int64_t>(logits.shape(1));
  const WithoutGil without_gil;
  each_row(pool, logits, [&](int64_t row, SamplerScratch& scratch) {
    const LogSum s = log_sum(k, logits.data() + row * n, n, scratch);
    tops.data()[row] = s.top, tokens.data()[row] = s.token, sums.data()[row] = s.sum;
  });
}

void largest_ids(const Floats& logits, const Ids& out) {
  const auto n = static_cast<int64_t>(logits.size()), k = static_cast<int64_t>(out.size());
  require(n > 0 && n <= kMaxVocabulary && k <= n, "more ids than logits, or too many logits");
  if (k == 0) return;
  SamplerScratch scratch;
  largest(kernels(), logits.data(), n, k, out.data(), scratch);
}

}  // namespace

void register_sampling(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler")
      .def("__init__", &init_sampler, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "choice"_a, "repetition"_a,
           "presence"_a, "frequency"_a, "bias_ids"_a, "bias"_a)
      .def("see", &see, "tokens"_a);
  m.def("choose", &choose, "pool"_a, "logits"_a, "samplers"_a, "out"_a);
  m.def("log_sums", &log_sums, "pool"_a, "logits"_a, "tops"_a, "tokens"_a, "sums"_a);
  m.def("largest", &largest_ids, "logits"_a, "out"_a);
  m.def(
      "random_word",
      [](const std::tuple<uint64_t, uint64_t>& seed, uint64_t position, uint64_t choice) {
        const uint64_t key[2] = {std::get<0>(seed), std::get<1>(seed)};
        return random_word(key, position, choice);
      },
      "seed"_a, "position"_a, "choice"_a);
}

}  // namespace w4conv::bindings
