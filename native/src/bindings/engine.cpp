#include "bindings/bindings.h"

#include <algorithm>
#include <mutex>

#include "engine/model.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

std::vector<float> padded_copy(const Floats& values) {
  std::vector<float> out(static_cast<size_t>(pad_to(static_cast<int64_t>(values.size()), kTileRows)), 0.0f);
  std::copy_n(values.data(), values.size(), out.begin());
  return out;
}

// A Model behind a lock: one forward pass at a time. What its matrices point into lives as long as it does.
struct BoundModel {
  Model model;
  std::mutex mutex;
  int forks = n_forks();           // of which the mutex knows
  std::vector<MatrixParts> parts;  // of its matrices
  bool ready = false;              // its shapes were checked after the last change
  BoundModel(ModelConfig config, int n_threads) : model(std::move(config), n_threads, kernels()) {}

  std::unique_lock<std::mutex> lock() {
    if (forks == n_forks()) return std::unique_lock(mutex);
    std::unique_lock own(mutex, std::try_to_lock);
    require(own.owns_lock(), "another thread ran the model when this process was forked; open it here");
    forks = n_forks();
    return own;
  }

  // expert: of a layer with a router; -1 for what is outside of experts.
  Linear& linear(int64_t layer, int64_t expert, const std::string& part) {
    if (layer < 0) return part == "embed_tokens" ? model.embedding : part == "lm_head" ? model.head : no_part(part);
    Layer& l = layer_at(layer);
    if (expert >= 0) {
      require(expert < 1 << 16, "too many experts");
      if (static_cast<size_t>(expert) >= l.experts.size()) l.experts.resize(static_cast<size_t>(expert) + 1);
      return feed_forward(l.experts[static_cast<size_t>(expert)], part);
    }
    if (part == "q_proj") return l.q;
    if (part == "k_proj") return l.k;
    if (part == "v_proj") return l.v;
    if (part == "qkv_proj") return l.qkv;
    if (part == "o_proj") return l.o;
    if (part == "router") return l.router;
    return feed_forward(l.mlp, part);
  }
  Norm& norm(int64_t layer, const std::string& part) {
    if (layer < 0 && part == "norm") return model.final_norm;
    Layer& l = layer_at(layer);
    if (part == "attention_norm") return l.attention_norm;
    if (part == "attention_out_norm") return l.attention_out_norm;
    if (part == "mlp_norm") return l.mlp_norm;
    if (part == "mlp_out_norm") return l.mlp_out_norm;
    if (part == "q_norm") return l.q_norm;
    if (part == "k_norm") return l.k_norm;
    throw std::invalid_argument("no such norm: " + part);
  }
  Layer& layer_at(int64_t layer) {
    require(layer >= 0 && layer < model.config().n_layers(), "no such layer");
    return model.layer(layer);
  }
  static Linear& feed_forward(FeedForward& f, const std::string& part) {
    if (part == "gate_proj") return f.gate;
    if (part == "up_proj") return f.up;
    if (part == "gate_up_proj") return f.gate_up;
    if (part == "down_proj") return f.down;
    return no_part(part);
  }
  [[noreturn]] static Linear& no_part(const std::string& part) { throw std::invalid_argument("no such part: " + part); }
};

void add_rope(ModelConfig& c, const FloatRows& frequencies, int64_t n_plain, float magnitude) {
  const auto n_pairs = static_cast<int64_t>(frequencies.shape(1));
  require(frequencies.shape(0) > 0 && n_pairs > 0, "frequencies: empty");
  c.ropes.push_back(
      {n_pairs, n_plain, magnitude, std::vector<float>(frequencies.data(), frequencies.data() + frequencies.size())});
}

void add_layer(ModelConfig& c, int64_t rope, int64_t window) {
  require(rope < static_cast<int64_t>(c.ropes.size()), "no such rope");
  require(window >= 0, "window: negative");
  c.layers.push_back({rope, window});
}

// The one list of activations by name.
Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "clamped_silu") return Activation::kClampedSilu;
  throw std::invalid_argument("no kernels for activation " + name);
}

void set_activation(ModelConfig& c, const std::string& name) { c.activation = activation_of(name); }

BoundModel* new_model(const ModelConfig& c, int threads) {
  require(c.vocab_size > 0 && c.hidden_size > 0 && c.head_dim > 0, "sizes must be positive");
  require(c.n_kv_heads > 0 && c.n_heads > 0 && c.n_heads % c.n_kv_heads == 0, "heads are not a multiple of KV heads");
  for (const RopeFrequencies& r : c.ropes) require(2 * r.n_pairs <= c.head_dim, "more pairs than half of a head");
  require(c.activation_bits == 8 || c.activation_bits == 16, "activations have 8 or 16 bits");
  require(threads >= 1 && threads <= 1024, "threads: 1 to 1024");
  return new BoundModel(c, threads);
}

void set_linear(BoundModel& m, int64_t layer, int64_t expert, const std::string& part, const MatrixParts& parts) {
  const Matrix weight = parts.matrix();
  const auto lock = m.lock();
  m.ready = false;
  m.linear(layer, expert, part).weight = weight;
  m.parts.push_back(parts);
}

void set_bias(BoundModel& m, int64_t layer, int64_t expert, const std::string& part, const Floats& values) {
  const auto lock = m.lock();
  m.ready = false;
  m.linear(layer, expert, part).bias = padded_copy(values);
}

void set_norm(BoundModel& m, int64_t layer, const std::string& part, const Floats& values) {
  const auto lock = m.lock();
  m.ready = false;
  m.norm(layer, part) = {static_cast<int64_t>(values.size()), padded_copy(values)};
}

void set_sinks(BoundModel& m, int64_t layer, const Floats& values) {
  require(static_cast<int64_t>(values.size()) == m.model.config().n_heads, "sinks: not one a head");
  const auto lock = m.lock();
  m.layer_at(layer).sinks.assign(values.data(), values.data() + values.size());
}

// Every matrix is there and has the shape that the layers before and after it ask for: the passes trust them.
void check_shapes(BoundModel& m) {
  const auto lock = m.lock();
  const ModelConfig& c = m.model.config();
  const int64_t q_width = c.n_heads * c.head_dim, kv_width = c.n_kv_heads * c.head_dim;
  auto check = [](const Linear& l, int64_t n_rows, int64_t n_columns) {
    require(l.is_defined() && l.weight.n_rows == n_rows && l.weight.n_columns == n_columns,
            "a matrix is missing or misshapen");
    require(l.bias.empty() || static_cast<int64_t>(l.bias.size()) == pad_to(n_rows, kTileRows), "a bias is misshapen");
  };
  auto check_norm = [](const Norm& norm, std::initializer_list<int64_t> sizes) {
    require(norm.n == 0 || std::find(sizes.begin(), sizes.end(), norm.n) != sizes.end(), "a norm is misshapen");
  };
  auto check_feed_forward = [&](const FeedForward& f) {
    const int64_t inner = f.down.weight.n_columns;
    check(f.down, c.hidden_size, inner);
    if (f.gate_up.is_defined()) return check(f.gate_up, 2 * inner, c.hidden_size);
    check(f.gate, inner, c.hidden_size);
    check(f.up, inner, c.hidden_size);
  };
  for (int64_t i = 0; i < c.n_layers(); i++) {
    const Layer& l = m.model.layer(i);
    if (l.qkv.is_defined()) {
      check(l.qkv, q_width + 2 * kv_width, c.hidden_size);
    } else {
      check(l.q, q_width, c.hidden_size);
      check(l.k, kv_width, c.hidden_size);
      check(l.v, kv_width, c.hidden_size);
    }
    check(l.o, c.hidden_size, q_width);
    for (const Norm* n : {&l.attention_norm, &l.attention_out_norm, &l.mlp_norm, &l.mlp_out_norm}) {
      check_norm(*n, {c.hidden_size});
    }
    check_norm(l.q_norm, {c.head_dim, q_width});
    check_norm(l.k_norm, {c.head_dim, kv_width});
    if (l.experts.empty()) {
      check_feed_forward(l.mlp);
    } else {
      check(l.router, static_cast<int64_t>(l.experts.size()), c.hidden_size);
      require(c.n_experts_per_token >= 1 && c.n_experts_per_token <= l.router.weight.n_rows, "experts a token");
      for (const FeedForward& f : l.experts) check_feed_forward(f);
    }
  }
  for (const Linear* l : {&m.model.embedding, &m.model.head}) {
    if (l->is_defined()) check(*l, c.vocab_size, c.hidden_size);
  }
  check_norm(m.model.final_norm, {c.hidden_size});
  m.ready = true;
}

// What another thread may change is checked under the lock: these two, and what setters write.
void require_ready(BoundModel& m, const Session& session) {
  require(m.ready, "check_shapes comes first");
  const ModelConfig& c = m.model.config();
  for (const LayerConfig& l : c.layers) {
    require(l.rope + session.rope_offset < static_cast<int64_t>(c.ropes.size()), "no such rope");
  }
}

void require_room(const Session& session, int64_t n) {
  require(session.n_tokens() + n <= session.n_positions(), "no room in the session");
}

// More rows of frequencies for a rope whose frequencies depend on the length of the sequence.
void extend_rope(BoundModel& m, int64_t rope, const FloatRows& frequencies) {
  require(rope >= 0 && rope < static_cast<int64_t>(m.model.config().ropes.size()), "no such rope");
  require(static_cast<int64_t>(frequencies.shape(1)) == m.model.config().ropes[rope].n_pairs, "frequencies: wrong width");
  const WithoutGil without_gil;
  const auto lock = m.lock();
  m.model.rope(rope).add_frequencies(frequencies.data(), static_cast<int64_t>(frequencies.shape(0)));
}

void forward(BoundModel& m, Session& session, const Tokens& tokens, const MutableFloatRows& logits) {
  const ModelConfig& c = m.model.config();
  const auto n = static_cast<int64_t>(tokens.size()), n_out = static_cast<int64_t>(logits.shape(0));
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(n_out <= 1 || n_out == n, "logits: rows are neither 0, 1 nor the number of tokens");
  require(static_cast<int64_t>(logits.shape(1)) == c.vocab_size, "logits: rows are not vocab_size long");
  for (size_t i = 0; i < tokens.size(); i++) {
    require(tokens.data()[i] >= 0 && tokens.data()[i] < c.vocab_size, "a token id is outside the vocabulary");
  }
  const WithoutGil without_gil;
  const auto lock = m.lock();
  require_ready(m, session);
  require_room(session, n);
  require(m.model.embedding.is_defined() && m.model.final_norm.n > 0, "no embedding or final norm");
  m.model.forward(session, tokens.data(), n, n_out == n, n_out == 0 ? nullptr : logits.data());
}

void restart_stopwatch(BoundModel& m) {
  const WithoutGil without_gil;
  const auto lock = m.lock();
  m.model.stopwatch.restart();
}

std::tuple<double, double, double, double> part_seconds(BoundModel& m) {
  const WithoutGil without_gil;
  const auto lock = m.lock();
  const auto& s = m.model.stopwatch.seconds();
  return {s[0], s[1], s[2], s[3]};
}

// Null for an array without rows.
float* capture_rows(const MutableFloatRows& rows, int64_t n, int64_t width) {
  if (rows.shape(0) == 0) return nullptr;
  require(static_cast<int64_t>(rows.shape(0)) == n && static_cast<int64_t>(rows.shape(1)) == pad_to(width, kTileRows),
          "capture: wrong shape");
  return rows.data();
}

void run_layer(BoundModel& m, Session& session, int64_t layer, const MutableFloatRows& x, const MutableFloatRows& qkv,
               const MutableFloatRows& o, const MutableFloatRows& gate_up, const MutableFloatRows& down, int until,
               bool after_attention) {
  const ModelConfig& c = m.model.config();
  const auto n = static_cast<int64_t>(x.shape(0));
  require(layer >= 0 && layer < c.n_layers(), "no such layer");
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(static_cast<int64_t>(x.shape(1)) == pad_to(c.hidden_size, kTileRows), "x: rows are not padded to 16");
  require(until >= 0 && until <= static_cast<int>(Until::kEnd), "until: no such hook");
  const WithoutGil without_gil;
  const auto lock = m.lock();
  require_ready(m, session);
  require_room(session, n);
  const Capture capture{capture_rows(qkv, n, c.hidden_size),
                        capture_rows(o, n, c.n_heads * c.head_dim),
                        capture_rows(gate_up, n, c.hidden_size),
                        capture_rows(down, n, m.model.layer(layer).mlp.down.weight.n_columns),
                        static_cast<Until>(until),
                        after_attention};
  m.model.run_layer(layer, session, n, x.data(), capture);
  if (layer + 1 == c.n_layers()) session.advance(n);
}

void finish(BoundModel& m, const FloatRows& x, const MutableFloatRows& logits) {
  const ModelConfig& c = m.model.config();
  const auto n = static_cast<int64_t>(x.shape(0));
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(static_cast<int64_t>(x.shape(1)) == pad_to(c.hidden_size, kTileRows), "x: rows are not padded to 16");
  require(static_cast<int64_t>(logits.shape(0)) == n && static_cast<int64_t>(logits.shape(1)) == c.vocab_size,
          "logits: wrong shape");
  const WithoutGil without_gil;
  const auto lock = m.lock();
  const Linear& head = m.model.head.is_defined() ? m.model.head : m.model.embedding;
  require(m.ready && head.is_defined() && m.model.final_norm.n > 0, "no head or final norm, or check_shapes has to come");
  m.model.finish(x.data(), n, logits.data());
}

bool cut(Session& s, int64_t n) {
  require(n >= 0 && n <= s.n_tokens(), "a session can only be cut to fewer tokens");
  return s.truncate(n);
}

// gate = activation(gate, up) of padded rows, n values each; zeros behind them.
void gated(Pool& pool, const std::string& activation, const MutableFloatRows& gate, const FloatRows& up, int64_t n) {
  const auto n_rows = static_cast<int64_t>(gate.shape(0)), width = static_cast<int64_t>(gate.shape(1));
  require(up.shape(0) == gate.shape(0) && up.shape(1) == gate.shape(1), "up: not of the shape of gate");
  require(n >= 0 && width == pad_to(n, kTileRows), "gate: rows are not padded to 16");
  const Activation a = activation_of(activation);
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  pool.run(n_rows, [&](int64_t m, int) {
    float* row = gate.data() + m * width;
    k.gated(a, row, up.data() + m * width, width, row);
    std::fill(row + n, row + width, 0.0f);
  });
}

// The softmax of each padded row of n values, in place.
void softmax(const MutableFloatRows& x, int64_t n) {
  const auto n_rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require(n >= 1 && width == pad_to(n, kTileRows), "x: rows are not padded to 16");
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  for (int64_t m = 0; m < n_rows; m++) k.softmax(x.data() + m * width, n, x.data() + m * width);
}

KvConfig kv_config(int64_t n_positions, const std::string& kind, int64_t window) {
  require(kind == "f16" || kind == "f32" || kind == "int8", "keys and values are f16, f32 or int8");
  require(n_positions > 0 && n_positions < (int64_t{1} << 31) && window >= 0, "positions or window: out of range");
  return {n_positions, kind == "f16" ? KvKind::kF16 : kind == "f32" ? KvKind::kF32 : KvKind::kInt8, window};
}

}  // namespace

void register_engine(nb::module_& m) {
  m.attr("MAX_TOKENS") = Model::kMaxTokens;
  nb::class_<Session>(m, "Session")
      .def_prop_ro("n_tokens", &Session::n_tokens)
      .def_prop_ro("n_positions", &Session::n_positions)
      .def_rw("rope_offset", &Session::rope_offset)
      .def("truncate", &cut, "n_tokens"_a);
  nb::class_<ModelConfig>(m, "ModelConfig")
      .def(nb::init<>())
      .def_rw("vocab_size", &ModelConfig::vocab_size)
      .def_rw("hidden_size", &ModelConfig::hidden_size)
      .def_rw("n_heads", &ModelConfig::n_heads)
      .def_rw("n_kv_heads", &ModelConfig::n_kv_heads)
      .def_rw("head_dim", &ModelConfig::head_dim)
      .def_rw("norm_eps", &ModelConfig::norm_eps)
      .def_rw("attention_scale", &ModelConfig::attention_scale)
      .def_rw("attention_softcap", &ModelConfig::attention_softcap)
      .def_rw("embedding_scale", &ModelConfig::embedding_scale)
      .def_rw("residual_scale", &ModelConfig::residual_scale)
      .def_rw("logits_divisor", &ModelConfig::logits_divisor)
      .def_rw("final_softcap", &ModelConfig::final_softcap)
      .def_rw("interleaved", &ModelConfig::interleaved)
      .def_rw("n_experts_per_token", &ModelConfig::n_experts_per_token)
      .def_rw("renormalized", &ModelConfig::renormalized)
      .def_rw("activation_bits", &ModelConfig::activation_bits)
      .def("set_activation", &set_activation, "name"_a)
      .def("add_rope", &add_rope, "frequencies"_a, "n_plain"_a, "magnitude"_a)
      .def("add_layer", &add_layer, "rope"_a, "window"_a);
  nb::class_<BoundModel>(m, "Model")
      .def("set_linear", &set_linear, "layer"_a, "expert"_a, "part"_a, "parts"_a)
      .def("set_bias", &set_bias, "layer"_a, "expert"_a, "part"_a, "values"_a)
      .def("set_norm", &set_norm, "layer"_a, "part"_a, "values"_a)
      .def("set_sinks", &set_sinks, "layer"_a, "values"_a)
      .def("check_shapes", &check_shapes)
      .def(
          "session",
          [](const BoundModel& b, int64_t n_positions, const std::string& kv, int64_t window) {
            return new Session(b.model.config(), kv_config(n_positions, kv, window));
          },
          "n_positions"_a, "kv"_a, "window"_a = 0, nb::rv_policy::take_ownership)
      .def(
          "session_nbytes",
          [](const BoundModel& b, int64_t n_positions, const std::string& kv, int64_t window) {
            return Session::nbytes(b.model.config(), kv_config(n_positions, kv, window));
          },
          "n_positions"_a, "kv"_a, "window"_a)
      .def("extend_rope", &extend_rope, "rope"_a, "frequencies"_a)
      .def("restart_stopwatch", &restart_stopwatch)
      .def("part_seconds", &part_seconds)
      .def("forward", &forward, "session"_a, "tokens"_a, "logits"_a)
      .def("finish", &finish, "x"_a, "logits"_a)
      .def("run_layer", &run_layer, "session"_a, "layer"_a, "x"_a, "qkv"_a, "o"_a, "gate_up"_a, "down"_a, "until"_a,
           "after_attention"_a);
  m.def("gated", &gated, "pool"_a, "activation"_a, "gate"_a, "up"_a, "n"_a);
  m.def("softmax", &softmax, "x"_a, "n"_a);
  m.def("new_model", &new_model, "config"_a, "threads"_a, nb::rv_policy::take_ownership);
}

}  // namespace w4conv::bindings
