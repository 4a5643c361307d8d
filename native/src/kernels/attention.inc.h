// Attention of one token in one pass over the keys: running maximum and sum, updated every kKeyBlock keys at fixed
// positions, so the result does not depend on how tokens were grouped. Lanes are keys for the scores, dimensions for the
// values.

inline vf load_kv(const uint16_t* p) { return from_f16(p); }
inline vf load_kv(const float* p) { return load(p); }
inline void store_kv_lanes(uint16_t* p, vf x) { to_f16(x, p); }
inline void store_kv_lanes(float* p, vf x) { store(p, x); }

template <class T>
void store_kv_as(const KvCache& cache, int64_t position, const float* key, const float* value) {
  const int64_t d = cache.head_dim, stride = cache.value_stride();
  alignas(64) float row[kLanes];
  for (int64_t head = 0; head < cache.n_kv_heads; head++) {
    T* keys =
        static_cast<T*>(cache.keys) + (head * cache.capacity + position / kKeyTile * kKeyTile) * d + position % kKeyTile;
    T* values = static_cast<T*>(cache.values) + (head * cache.capacity + position) * stride;
    for (int64_t i = 0; i < stride; i += kLanes) {
      const int64_t n = d - i < kLanes ? d - i : kLanes;  // may be 0 or less in the padding
      T lanes[kLanes];
      for (int j = 0; j < kLanes; j++) row[j] = j < n ? key[head * d + i + j] : 0.0f;
      store_kv_lanes(lanes, load(row));
      for (int j = 0; j < n; j++) keys[(i + j) * kKeyTile] = lanes[j];
      for (int j = 0; j < kLanes; j++) row[j] = j < n ? value[head * d + i + j] : 0.0f;
      store_kv_lanes(values + i, load(row));
    }
  }
}
void store_kv(const KvCache& cache, int64_t position, const float* key, const float* value) {
  cache.wide ? store_kv_as<float>(cache, position, key, value) : store_kv_as<uint16_t>(cache, position, key, value);
}

// scratch, for each query head: out [padded head_dim], scores [kKeyBlock], sums [16], then its running maximum.
template <class T>
void attention_as(const KvCache& cache, int64_t kv_head, int64_t n_group, int64_t first, int64_t position,
                  const AttentionRule& rule, const float* q, float* out, float* scratch) {
  const int64_t d = cache.head_dim, stride = cache.value_stride();
  const T* keys = static_cast<const T*>(cache.keys) + kv_head * cache.capacity * d;
  const T* values = static_cast<const T*>(cache.values) + kv_head * cache.capacity * stride;
  float* const acc = scratch;                        // [n_group][stride]
  float* const scores = acc + n_group * stride;      // [n_group][kKeyBlock]
  float* const sums = scores + n_group * kKeyBlock;  // [n_group][16]
  float* const maxima = sums + n_group * kTileRows;  // [n_group]
  for (int64_t i = 0; i < n_group * stride; i += kLanes) store(acc + i, vf{});
  for (int64_t i = 0; i < n_group * kTileRows; i += kLanes) store(sums + i, vf{});
  for (int64_t g = 0; g < n_group; g++) {
    maxima[g] = rule.sinks == nullptr ? -__builtin_inff() : rule.sinks[kv_head * n_group + g];
    if (rule.sinks != nullptr) sums[g * kTileRows] = 1.0f;  // exp(sink - sink)
  }

  alignas(64) static const int32_t kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t start = first / kKeyBlock * kKeyBlock; start <= position; start += kKeyBlock) {
    const int64_t end = start + kKeyBlock <= position + 1 ? start + kKeyBlock : position + 1;
    for (int64_t g = 0; g < n_group; g++) {
      // 1. scores of the block; a key outside first..position scores -inf
      vf highest = splat(-__builtin_inff());
      for (int64_t key = start; key < start + kKeyBlock; key += kKeyTile) {
        vf s[kVectors] = {};
        if (key < end) {
          const T* tile = keys + key * d;
          for (int64_t i = 0; i < d; i++) {
            const vf qi = splat(q[g * d + i]);
            for (int v = 0; v < kVectors; v++) s[v] = fma(qi, load_kv(tile + i * kKeyTile + v * kLanes), s[v]);
          }
        }
        for (int v = 0; v < kVectors; v++) {
          const vi index = load_bits(kIota + v * kLanes) + static_cast<int32_t>(key);
          const vi seen = (vi)(index >= static_cast<int32_t>(first)) & (vi)(index <= static_cast<int32_t>(position));
          vf score = s[v] * rule.scale;
          if (rule.softcap > 0) score = softcap_of(score, splat(rule.softcap));
          score = select(seen, score, splat(-__builtin_inff()));
          highest = select((vi)(score > highest), score, highest);
          store(scores + g * kKeyBlock + (key - start) + v * kLanes, score);
        }
      }
      // 2. new maximum; rescale what was summed under the old one
      float top = maxima[g];
      for (int i = 0; i < kLanes; i++) top = highest[i] > top ? highest[i] : top;
      const vf shrink = exp_of(splat(maxima[g] - top));
      maxima[g] = top;
      for (int64_t i = 0; i < stride; i += kLanes) store(acc + g * stride + i, load(acc + g * stride + i) * shrink);
      // 3. weights and their sum
      for (int v = 0; v < kVectors; v++) {
        float* sum = sums + g * kTileRows + v * kLanes;
        vf s = load(sum) * shrink;
        for (int64_t i = 0; i < kKeyBlock; i += kKeyTile) {
          float* score = scores + g * kKeyBlock + i + v * kLanes;
          const vf p = exp_of(load(score) - splat(top));
          store(score, p);
          s += p;
        }
        store(sum, s);
      }
    }
    // 4. values, keys ascending
    const int64_t begin = start < first ? first : start;
    for (int64_t g = 0; g < n_group; g++) {
      for (int64_t i = 0; i < stride; i += kLanes) {
        vf a = load(acc + g * stride + i);
        for (int64_t key = begin; key < end; key++) {
          a = fma(splat(scores[g * kKeyBlock + key - start]), load_kv(values + key * stride + i), a);
        }
        store(acc + g * stride + i, a);
      }
    }
  }
  for (int64_t g = 0; g < n_group; g++) {
    vf lanes[kVectors];
    for (int v = 0; v < kVectors; v++) lanes[v] = load(sums + g * kTileRows + v * kLanes);
    const float sum = sum16(lanes);
    for (int64_t i = 0; i < d; i++) out[g * d + i] = acc[g * stride + i] / sum;
  }
}
void attention(const KvCache& cache, int64_t kv_head, int64_t n_group, int64_t first, int64_t position,
               const AttentionRule& rule, const float* q, float* out, float* scratch) {
  cache.wide ? attention_as<float>(cache, kv_head, n_group, first, position, rule, q, out, scratch)
             : attention_as<uint16_t>(cache, kv_head, n_group, first, position, rule, q, out, scratch);
}
