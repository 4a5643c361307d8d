// Attention, one KV split of kSplitKeys keys at a time (docs/numerics.md 5). Splits lie at fixed positions, so the result
// does not depend on how tokens were grouped or shared among threads. Up to kTokens rows of queries share each load of a key
// or a value. Lanes are keys for the scores, dimensions for the values.

inline vf load_kv(const uint16_t* p) { return from_f16(p); }
inline vf load_kv(const float* p) { return load(p); }
inline vf load_kv(const int8_t* p) { return __builtin_convertvector(from_bytes(p), vf); }

// Of a stored value, where a vector of its dimensions lies.
constexpr int64_t value_vector(int64_t v) { return v / kVectors * kSplitKeys * 16 + v % kVectors * kLanes; }

// ---- storing ---------------------------------------------------------------------------------------------------------

inline void store_lanes(uint16_t* p, vf x, vf) { to_f16(x, p); }
inline void store_lanes(float* p, vf x, vf) { store(p, x); }
inline void store_lanes(int8_t* p, vf x, vf scale) {
  const vi codes = round_to_int(x / scale);
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(codes[i]);
}

// One head's row of a key or value: f(first dimension, its lanes as stored); what lies behind n is zero.
template <class T, class F>
inline void for_stored(const float* x, int64_t n, float* scale, const F& f) {
  alignas(64) float row[kLanes];
  vf divisor = splat(1.0f);
  int64_t n_coded = n;
  if (scale != nullptr) {
    int32_t top_bits = 0;
    for (int64_t i = 0; i < n; i++) {
      const int32_t bits = __builtin_bit_cast(int32_t, x[i]) & 0x7FFFFFFF;
      top_bits = bits > top_bits ? bits : top_bits;
    }
    *scale = scale_of(top_bits, 127.0f);
    if (*scale > 0) divisor = splat(*scale);
    if (!(*scale > 0)) n_coded = 0;
  }
  for (int64_t i = 0; i < pad_to(n, 16); i += kLanes) {
    for (int j = 0; j < kLanes; j++) row[j] = i + j < n_coded ? x[i + j] : 0.0f;
    T lanes[kLanes];
    store_lanes(lanes, load(row), divisor);
    f(i, lanes);
  }
}

template <class T>
void store_kv_as(const KvCache& c, int64_t position, const float* key, const float* value) {
  const int64_t d = c.head_dim, slot = c.slot(position);
  for (int64_t head = 0; head < c.n_kv_heads; head++) {
    const int64_t at = c.scale_at(head, slot);
    T* keys = static_cast<T*>(c.keys) + c.key_at(head, slot);
    T* values = static_cast<T*>(c.values) + c.value_at(head, slot);
    for_stored<T>(key + head * d, d, c.key_scales == nullptr ? nullptr : c.key_scales + at, [&](int64_t i, const T* lanes) {
      for (int64_t j = 0; j < kLanes && i + j < d; j++) keys[(i + j) * kKeyTile] = lanes[j];
    });
    for_stored<T>(
        value + head * d, d, c.value_scales == nullptr ? nullptr : c.value_scales + at,
        [&](int64_t i, const T* lanes) { __builtin_memcpy(values + value_vector(i / kLanes), lanes, sizeof(T) * kLanes); });
  }
}
void store_kv(const KvCache& c, int64_t position, const float* key, const float* value) {
  switch (c.kind) {
    case KvKind::kF16:
      return store_kv_as<uint16_t>(c, position, key, value);
    case KvKind::kF32:
      return store_kv_as<float>(c, position, key, value);
    case KvKind::kInt8:
      return store_kv_as<int8_t>(c, position, key, value);
  }
}

// ---- attention -------------------------------------------------------------------------------------------------------

// f(Count<n>) for n = 1..kMost.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <int kMost, class F>
inline void with_count(int64_t n, const F& f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f(Count<kMost>{});
}

// Vectors that kRows rows run through together: as many sums as the registers hold.
constexpr int width_of(int n_rows) { return 4 * n_rows <= 2 * kTokens ? 4 : 2; }
static_assert(width_of(1) * kLanes <= kKeyStep && kSplitKeys % kKeyStep == 0 && kKeyStep % kKeyTile == 0);

// scores[row][key] of kWidth * kLanes keys; q[i * ldq + row]. ahead: what is fetched for later lies so far behind.
template <int kRows, int kWidth, class T>
inline void add_scores(const T* const (&keys)[kWidth], int64_t d, int64_t ahead, const float* q, int64_t ldq,
                       float* scores) {
  vf s[kRows][kWidth];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) s[r][v] = vf{};
  }
  for (int64_t i = 0; i < d; i++) {
    vf k[kWidth];
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) {
      k[v] = load_kv(keys[v] + i * kKeyTile);
      prefetch(keys[v] + i * kKeyTile + ahead);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      const vf qr = splat(q[i * ldq + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; v++) s[r][v] = fma(qr, k[v], s[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) store(scores + r * kSplitKeys + v * kLanes, s[r][v]);
  }
}

// out[row][kWidth * kLanes] += weights[row][key] * values[key], keys ascending.
template <int kRows, int kWidth, class T>
inline void add_values(const T* values, int64_t stride, int64_t n, const float* weights, float* out) {
  vf a[kRows][kWidth];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) a[r][v] = load(out + r * stride + v * kLanes);
  }
  for (int64_t key = 0; key < n; key++) {
    vf x[kWidth];
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) {
      const T* const from = values + key * 16 + value_vector(v);
      x[v] = load_kv(from);
      prefetch(from + kKeyStep * 16);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      const vf p = splat(weights[r * kSplitKeys + key]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; v++) a[r][v] = fma(p, x[v], a[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; v++) store(out + r * stride + v * kLanes, a[r][v]);
  }
}

// A KV split of one head, for up to kTokens rows.
template <class T>
struct KvSplit {
  const KvCache& cache;
  int64_t kv_head;
  const AttentionRule& rule;
  int64_t start;  // first position of the split
  float* scores;  // [row][kSplitKeys]
  float* biases;  // the same, of the keys' biases (AttentionRule::cos_sin)

  // Keys of the split that a row sees: attention sinks, those before n_sink_keys, and at most `position`, and
  // first..position.
  struct Seen {
    int64_t sink_end, first, end;
  };
  Seen seen_at(int64_t position) const {
    const auto within = [&](int64_t p) { return p < start ? start : p > start + kSplitKeys ? start + kSplitKeys : p; };
    const int64_t end = within(position + 1), sink_end = within(cache.n_sink_keys);
    return {sink_end < end ? sink_end : end, within(cache.first(position)), end};
  }

  // 1. q.k of the keys begin..end, whole tiles at least
  void score(const Queries& q, int64_t row, int64_t n_rows, int64_t begin, int64_t end) const {
    with_count<kTokens>(n_rows, [&](auto count) {
      constexpr int kRows = decltype(count)::value, kWidth = width_of(kRows);
      constexpr int64_t kStep = kWidth * kLanes;
      const T* const keys = static_cast<const T*>(cache.keys);
      for (int64_t key = start + (begin - start) / kStep * kStep; key < pad_to(end, kKeyTile); key += kStep) {
        const T* at[kWidth];
        for (int v = 0; v < kWidth; v++) at[v] = keys + cache.key_at(kv_head, cache.slot(key + v * kLanes));
        const int64_t d = cache.head_dim, n_bias_terms = rule.n_bias_terms;
        const int64_t ahead = key + kKeyStep < end ? kKeyStep * d : 0;
        add_scores<kRows, kWidth>(at, d, ahead, q.values + row, q.n_rows, scores + key - start);
        if (rule.cos_sin == nullptr) continue;
        const float* cos_sin_at[kWidth];
        for (int v = 0; v < kWidth; v++) {
          const int64_t position = key + v * kLanes, lane = position % kKeyTile;
          cos_sin_at[v] = rule.cos_sin + (position - lane) * n_bias_terms + lane;
        }
        add_scores<kRows, kWidth>(cos_sin_at, n_bias_terms, kKeyStep * n_bias_terms, q.bias_terms + row, q.n_rows,
                                  biases + key - start);
      }
    });
  }

  // 2. one row's weights exp(score - top) in place of the scores, times the scales of the values, from a tile's begin on; a
  // key outside of `seen` weighs nothing
  void weigh(float* row, const Seen& seen, int64_t begin, float* sum, float* top) const {
    if (seen.sink_end <= start && seen.first >= seen.end) {
      *sum = 0.0f;
      *top = -__builtin_inff();
      return;
    }
    const int64_t end = pad_to(seen.end, kKeyTile);
    alignas(64) static const int32_t kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi iota = load_bits(kIota);
    vf highest = splat(-__builtin_inff());
    for (int64_t key = begin; key < end; key += kLanes) {
      float* const p = row + key - start;
      vf score = load(p);
      if (cache.key_scales != nullptr) score = score * load(cache.key_scales + cache.scale_at(kv_head, cache.slot(key)));
      if (rule.cos_sin != nullptr) score = score + load(p + (biases - scores));
      score = score * rule.scale;
      if (rule.softcap > 0) score = softcap_of(score, splat(rule.softcap));
      const vi index = iota + static_cast<int32_t>(key);
      const vi is_seen =
          ((vi)(index < static_cast<int32_t>(seen.sink_end)) | (vi)(index >= static_cast<int32_t>(seen.first))) &
          (vi)(index < static_cast<int32_t>(seen.end));
      score = select(is_seen, score, splat(-__builtin_inff()));
      highest = select((vi)(score > highest), score, highest);
      store(p, score);
    }
    *top = -__builtin_inff();
    for (int i = 0; i < kLanes; i++) *top = highest[i] > *top ? highest[i] : *top;
    vf sums[kVectors] = {};
    for (int64_t key = begin; key < end; key += kKeyTile) {
      for (int v = 0; v < kVectors; v++) {
        float* const p = row + key - start + v * kLanes;
        vf weight = exp_of(load(p) - splat(*top));
        sums[v] += weight;
        if (cache.value_scales != nullptr) {
          weight = weight * load(cache.value_scales + cache.scale_at(kv_head, cache.slot(key + v * kLanes)));
        }
        store(p, weight);
      }
    }
    *sum = sum16(sums);
  }

  // 3. out[row] += weight * value for the keys begin..end
  void add(int64_t n_rows, int64_t begin, int64_t end, const float* weights, float* out) const {
    if (begin >= end) return;
    const int64_t stride = cache.value_stride(), n_vectors = stride / kLanes;
    with_count<kTokens>(n_rows, [&](auto count) {
      constexpr int kRows = decltype(count)::value, kWidth = width_of(kRows);
      for (int64_t key = begin, n; key < end; key += n) {
        const int64_t slot = cache.slot(key);
        n = kKeyStep - slot % kKeyStep;  // whole steps, and never beyond a block
        if (end - key < n) n = end - key;
        const T* const from = static_cast<const T*>(cache.values) + cache.value_at(kv_head, slot);
        const float* const w = weights + key - start;
        int64_t v = 0;
        for (; v + kWidth <= n_vectors; v += kWidth) {
          add_values<kRows, kWidth>(from + value_vector(v), stride, n, w, out + v * kLanes);
        }
        for (; v < n_vectors; v++) {
          add_values<kRows, 1>(from + value_vector(v), stride, n, w, out + v * kLanes);
        }
      }
    });
  }
  // The keys that every row sees together, those before and behind them row by row.
  void add_seen(int64_t n_rows, const int64_t* begins, const int64_t* ends, float* out) const {
    int64_t begin = begins[0], end = ends[0];
    for (int64_t r = 1; r < n_rows; r++) {
      begin = begins[r] > begin ? begins[r] : begin;
      end = ends[r] < end ? ends[r] : end;
    }
    if (begin > end) begin = end;
    const auto one = [&](int64_t r, int64_t from, int64_t to) {
      add(1, from, to, scores + r * kSplitKeys, out + r * cache.value_stride());
    };
    for (int64_t r = 0; r < n_rows; r++) one(r, begins[r], ends[r] < begin ? ends[r] : begin);
    add(n_rows, begin, end, scores, out);
    for (int64_t r = 0; r < n_rows; r++) one(r, begins[r] > end ? begins[r] : end, ends[r]);
  }

  void attention(const Queries& q, int64_t row, int64_t n_rows, const SplitSums& out) const {
    Seen seen[kTokens];
    int64_t begin = start + kSplitKeys, end = start;  // of the keys that any row sees
    for (int64_t r = 0; r < n_rows; r++) {
      seen[r] = seen_at(q.position + (row + r) / q.n_group);
      const int64_t first = seen[r].sink_end > start ? start : seen[r].first;
      begin = first < begin ? first : begin;
      end = seen[r].end > end ? seen[r].end : end;
    }
    float* const sums = out.values + row * cache.value_stride();
    for (int64_t i = 0; i < n_rows * cache.value_stride(); i += kLanes) store(sums + i, vf{});
    if (begin < end) score(q, row, n_rows, begin, end);
    const int64_t first_tile = begin - begin % kKeyTile;
    constexpr int64_t kLine = 64 / (16 * sizeof(T)) > 0 ? 64 / (16 * sizeof(T)) : 1;  // slots in a cache line
    const T* const first_values =
        static_cast<const T*>(cache.values) + cache.value_at(kv_head, cache.slot(begin < end ? begin : start));
    int64_t begins[kTokens], ends[kTokens];
    for (int64_t r = 0; r < n_rows; r++) {
      // While weights are made memory would be idle: each row fetches a share of the values that are read first. (In a
      // function of its own the loop would be taken for one that does nothing.)
      for (int64_t i = r * kKeyStep / n_rows; i < (r + 1) * kKeyStep / n_rows; i += kLine) {
        for (int v = 0; v < 4; v++) prefetch(first_values + value_vector(v * kVectors) + i * 16);
      }
      weigh(scores + r * kSplitKeys, seen[r], first_tile, out.sums + row + r, out.tops + row + r);
      begins[r] = start;
      ends[r] = seen[r].sink_end;
    }
    if (cache.n_sink_keys > start) add_seen(n_rows, begins, ends, sums);
    for (int64_t r = 0; r < n_rows; r++) {
      begins[r] = seen[r].first;
      ends[r] = seen[r].end;
    }
    add_seen(n_rows, begins, ends, sums);
  }
};

template <class T>
void attention_split_as(const KvCache& c, int64_t kv_head, const Queries& q, int64_t split, const AttentionRule& rule,
                        const SplitSums& out, float* scratch) {
  const KvSplit<T> s{c, kv_head, rule, split * kSplitKeys, scratch, scratch + kTokenGroup * kSplitKeys};
  for (int64_t row = 0; row < q.n_rows; row += kTokens) {
    s.attention(q, row, q.n_rows - row < kTokens ? q.n_rows - row : kTokens, out);
  }
}
void attention_split(const KvCache& c, int64_t kv_head, const Queries& q, int64_t split, const AttentionRule& rule,
                     const SplitSums& out, float* scratch) {
  switch (c.kind) {
    case KvKind::kF16:
      return attention_split_as<uint16_t>(c, kv_head, q, split, rule, out, scratch);
    case KvKind::kF32:
      return attention_split_as<float>(c, kv_head, q, split, rule, out, scratch);
    case KvKind::kInt8:
      return attention_split_as<int8_t>(c, kv_head, q, split, rule, out, scratch);
  }
}

void merge_splits(const KvCache& c, int64_t kv_head, const Queries& q, const AttentionRule& rule, float* splits,
                  int64_t n_splits, float* const* out) {
  const int64_t stride = c.value_stride(), size = SplitSums::size(q.n_rows, stride);
  for (int64_t row = 0; row < q.n_rows; row++) {
    const float sink = rule.sinks == nullptr ? 0.0f : rule.sinks[kv_head * q.n_group + row % q.n_group];
    float top = rule.sinks == nullptr ? -__builtin_inff() : sink;
    for (int64_t s = 0; s < n_splits; s++) {
      const float highest = SplitSums(splits + s * size, q.n_rows, stride).tops[row];
      top = highest > top ? highest : top;
    }
    float sum = rule.sinks == nullptr ? 0.0f : exp_of(splat(sink - top))[0];
    float* total = nullptr;  // the values of the first split that has any
    for (int64_t s = 0; s < n_splits; s++) {
      const SplitSums split(splits + s * size, q.n_rows, stride);
      if (split.sums[row] == 0.0f) continue;
      const vf weight = exp_of(splat(split.tops[row] - top));
      sum = sum + split.sums[row] * weight[0];
      float* const values = split.values + row * stride;
      for (int64_t i = 0; i < stride; i += kLanes) {
        const vf x = load(values + i) * weight;
        total == nullptr ? store(values + i, x) : store(total + i, load(total + i) + x);
      }
      if (total == nullptr) total = values;
    }
    for (int64_t i = 0; i < c.head_dim; i++) out[row][i] = total[i] / sum;
  }
}
