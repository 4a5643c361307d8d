#include "ops/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace w4conv {
namespace {

constexpr int64_t kSumBlock = 4096;  // weights whose sum is kept, so that a draw skips them
static_assert(kSumBlock % kPeakBlock == 0);

// Logits on their way: a copy of n, with -infinity behind them, and the largest of each kPeakBlock of them.
struct Row {
  float* x;
  int64_t n, n_padded;
  float* peaks;
  float top;

  int64_t n_blocks() const { return n_padded / kPeakBlock; }
  int32_t fault() const { return !(top < std::numeric_limits<float>::infinity()) ? kNotANumber : kNoToken; }
  bool is_sound() const { return std::isfinite(top); }
  int64_t first_largest() const {
    const int64_t block = std::find(peaks, peaks + n_blocks(), top) - peaks;
    return std::find(x + block * kPeakBlock, x + n, top) - x;
  }
};

Row copied(const float* logits, int64_t n, SamplerScratch& scratch) {
  Row row{};
  row.n = n;
  row.n_padded = pad_to(n, kPeakBlock);
  row.x = scratch.logits.reserve_for<float>(row.n_padded);
  row.peaks = scratch.peaks.reserve_for<float>(row.n_blocks());
  std::copy_n(logits, n, row.x);
  std::fill(row.x + n, row.x + row.n_padded, -std::numeric_limits<float>::infinity());
  return row;
}

void find_peaks(const Kernels& kernels, Row& row) {
  kernels.peaks(row.x, row.n_padded, row.peaks);
  row.top = row.peaks[0];
  for (int64_t b = 1; b < row.n_blocks(); b++) {
    const float peak = row.peaks[b];
    row.top = peak > row.top || std::isnan(peak) ? peak : row.top;
    if (std::isnan(peak)) return;
  }
}

// The `need` largest units of amounts by falling key: every key above `least`, and of that key the first n_least ones.
struct Cut {
  uint32_t least;
  int64_t n_least;
};
// Radix selection: digits of 11, 11 and 10 bits, from the highest on. Amounts sum up to `need` at least, which is above 0.
// Equal keys have equal amounts. left: room for n indices.
template <class Key, class Amount>
Cut select(int64_t n, uint64_t need, const Key& key, const Amount& amount, int32_t* left) {
  constexpr int kShifts[] = {21, 10, 0}, kWidths[] = {11, 11, 10};
  constexpr int kWays = 4;  // sums of a digit side by side, so that none waits for the one before
  uint32_t prefix = 0;
  for (int level = 0; level < 3; level++) {
    const int shift = kShifts[level];
    const uint32_t mask = (1u << kWidths[level]) - 1;
    uint64_t sums[kWays][1 << 11] = {};
    const auto add = [&](int64_t i, int64_t way) { sums[way % kWays][key(i) >> shift & mask] += amount(i); };
    for (int64_t i = 0; i < n; i++) add(level == 0 ? i : left[i], i);
    const auto sum_of = [&](uint32_t digit) { return sums[0][digit] + sums[1][digit] + sums[2][digit] + sums[3][digit]; };
    uint32_t digit = mask;
    while (sum_of(digit) < need) need -= sum_of(digit--);
    prefix |= digit << shift;
    int64_t n_left = 0;
    for (int64_t i = 0; i < n; i++) {
      const auto own = static_cast<int32_t>(level == 0 ? i : left[i]);
      left[n_left] = own;
      n_left += key(own) >> shift == prefix >> shift;
    }
    n = n_left;
  }
  const uint64_t unit = amount(left[0]);
  return {prefix, static_cast<int64_t>((need + unit - 1) / unit)};
}

// Ascending as the float32 numbers are, -0 as 0.
uint32_t key_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

uint64_t whole_weight(float w) {
  return std::bit_cast<uint64_t>(static_cast<double>(w) * kWholeWeight + 0x1.8p52) - 0x4338000000000000;
}

// Ascending ids of the k largest logits; of equal ones the first.
int64_t take_largest(const Row& row, int64_t k, SamplerScratch& scratch, int32_t*& ids) {
  ids = scratch.candidates.reserve_for<int32_t>(row.n);
  k = std::min(k, row.n);
  // As many blocks have a peak of at least `bound`, so at least k logits are no less.
  float bound = -std::numeric_limits<float>::infinity();
  if (k < row.n_blocks()) {
    float* const peaks = scratch.sums.reserve_for<float>(row.n_blocks());
    std::copy_n(row.peaks, row.n_blocks(), peaks);
    std::nth_element(peaks, peaks + k - 1, peaks + row.n_blocks(), std::greater<>());
    bound = peaks[k - 1];
  }
  int64_t n = 0;
  for (int64_t b = 0; b < row.n_blocks(); b++) {
    if (row.peaks[b] < bound) continue;
    for (int64_t i = b * kPeakBlock; i < std::min((b + 1) * kPeakBlock, row.n); i++) {
      ids[n] = static_cast<int32_t>(i);
      n += row.x[i] >= bound;
    }
  }
  if (n == k) return k;
  const auto key = [&](int64_t i) { return key_of(row.x[ids[i]]); };
  auto* const left = scratch.left.reserve_for<int32_t>(n);
  const Cut cut = select(n, static_cast<uint64_t>(k), key, [](int64_t) { return uint64_t{1}; }, left);
  int64_t n_kept = 0, n_least = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t own = key(i);
    if (own > cut.least || (own == cut.least && n_least++ < cut.n_least)) ids[n_kept++] = ids[i];
  }
  return n_kept;
}

}  // namespace

uint64_t random_word(const uint64_t (&key)[2], uint64_t position, uint64_t choice) {
  uint64_t c[4] = {position, choice, 0, 0}, k[2] = {key[0], key[1]};
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 p0 = static_cast<unsigned __int128>(c[0]) * 0xD2E7470EE14C6C93;
    const unsigned __int128 p1 = static_cast<unsigned __int128>(c[2]) * 0xCA5A826395121157;
    const uint64_t next[4] = {static_cast<uint64_t>(p1 >> 64) ^ c[1] ^ k[0], static_cast<uint64_t>(p1),
                              static_cast<uint64_t>(p0 >> 64) ^ c[3] ^ k[1], static_cast<uint64_t>(p0)};
    std::copy_n(next, 4, c);
    k[0] += 0x9E3779B97F4A7C15;
    k[1] += 0xBB67AE8584CAA73B;
  }
  return c[0];
}

void Sampler::see(const int32_t* tokens, int64_t n) {
  position_ += static_cast<uint64_t>(n);
  if (!counts()) return;
  for (int64_t i = 0; i < n; i++) seen_.try_emplace(tokens[i], 0);
}

void Sampler::accept(int32_t token) {
  position_++;
  if (counts()) seen_[token]++;
}

void Sampler::change(float* x, int64_t n) const {
  for (const auto& [token, value] : config_.bias) {
    if (token < n) x[token] += value;
  }
  for (const auto& [token, n_times] : seen_) {
    if (token >= n) continue;
    float& own = x[token];
    own = own > 0 ? own / config_.repetition : own * config_.repetition;
    if (n_times == 0) continue;
    own -= config_.frequency * static_cast<float>(n_times);
    own -= config_.presence;
  }
}

int32_t Sampler::choose(const Kernels& kernels, const float* logits, int64_t n, SamplerScratch& scratch) const {
  const SamplerConfig& c = config_;
  Row row = copied(logits, n, scratch);
  change(row.x, n);
  find_peaks(kernels, row);
  if (!row.is_sound()) return row.fault();
  if (c.temperature == 0) return static_cast<int32_t>(row.first_largest());

  int32_t* ids = nullptr;  // of the logits that remain; null: all
  int64_t m = row.n;
  if (c.top_k > 0 && c.top_k < n) {
    m = take_largest(row, c.top_k, scratch, ids);
    for (int64_t i = 0; i < m; i++) row.x[i] = row.x[ids[i]];
    std::fill(row.x + m, row.x + pad_to(m, kPeakBlock), -std::numeric_limits<float>::infinity());
  }
  const int64_t padded = pad_to(m, kPeakBlock), n_sums = (padded + kSumBlock - 1) / kSumBlock;
  float* const w = scratch.weights.reserve_for<float>(padded);
  auto* const sums = scratch.sums.reserve_for<uint64_t>(n_sums);
  uint64_t total = 0;
  const auto sum_up = [&](const auto& of_block) {
    total = 0;
    for (int64_t b = 0; b < n_sums; b++) {
      const int64_t begin = b * kSumBlock, size = std::min(kSumBlock, padded - begin);
      total += sums[b] = of_block(begin, size);
    }
  };
  sum_up([&](int64_t at, int64_t size) { return kernels.weigh(row.x + at, size, row.top, c.temperature, w + at); });

  float least = c.min_p;
  if (c.top_p < 1) {
    const auto share = static_cast<uint64_t>(std::ceil(static_cast<double>(total) * c.top_p));
    const auto key = [&](int64_t i) { return std::bit_cast<uint32_t>(w[i]); };
    auto* const left = scratch.left.reserve_for<int32_t>(m);
    const Cut cut =
        select(m, std::clamp<uint64_t>(share, 1, total), key, [&](int64_t i) { return whole_weight(w[i]); }, left);
    const float smallest = std::bit_cast<float>(cut.least);
    if (smallest >= least) {
      least = smallest;
      int64_t n_least = 0;
      for (int64_t i = 0; i < m; i++) {
        if (w[i] == least && n_least++ >= cut.n_least) w[i] = 0;
      }
    }
  }
  if (least > 0) sum_up([&](int64_t at, int64_t size) { return kernels.sum_weights(w + at, size, least); });

  uint64_t rest =
      static_cast<uint64_t>(static_cast<unsigned __int128>(random_word(c.seed, position_, c.choice)) * total >> 64);
  int64_t i = 0;
  for (const uint64_t* sum = sums; rest >= *sum; sum++, i += kSumBlock) rest -= *sum;
  for (;; i++) {
    const uint64_t own = w[i] >= least ? whole_weight(w[i]) : 0;
    if (rest < own) break;
    rest -= own;
  }
  return ids == nullptr ? static_cast<int32_t>(i) : ids[i];
}

LogSum log_sum(const Kernels& kernels, const float* logits, int64_t n, SamplerScratch& scratch) {
  Row row = copied(logits, n, scratch);
  find_peaks(kernels, row);
  if (!row.is_sound()) return {row.top, row.fault(), 0};
  float* const w = scratch.weights.reserve_for<float>(row.n_padded);
  return {row.top, static_cast<int32_t>(row.first_largest()), kernels.weigh(row.x, row.n_padded, row.top, 1.0f, w)};
}

void largest(const Kernels& kernels, const float* logits, int64_t n, int64_t k, int32_t* out, SamplerScratch& scratch) {
  Row row = copied(logits, n, scratch);
  find_peaks(kernels, row);
  int32_t* ids = nullptr;
  const int64_t n_kept = take_largest(row, k, scratch, ids);
  std::stable_sort(ids, ids + n_kept, [&](int32_t a, int32_t b) { return row.x[a] > row.x[b]; });
  std::copy_n(ids, n_kept, out);
}

}  // namespace w4conv
