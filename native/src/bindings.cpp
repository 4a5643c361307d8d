// The Python face of the kernels and the engine: shapes are checked here, the code behind trusts them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_set.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "engine/calibrated.h"
#include "engine/convert.h"
#include "engine/dequantize.h"
#include "engine/model.h"
#include "lost_pages.h"
#include "vocabulary.h"
#include "w4conv/cpu.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace w4conv {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableFloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatTiles = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableFloatTiles = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableCodeTiles = nb::ndarray<int8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableHalfTiles = nb::ndarray<uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableDoubleRows = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Columns = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

Kind kind_of(const std::string& name) {
  if (name == "int4") return Kind::kInt4;
  if (name == "int4z") return Kind::kInt4z;
  if (name == "int4o") return Kind::kInt4o;
  if (name == "nf4") return Kind::kNf4;
  if (name == "fp4") return Kind::kFp4;
  if (name == "e2m1") return Kind::kE2m1;
  if (name == "int8") return Kind::kInt8;
  if (name == "f16") return Kind::kF16;
  if (name == "bf16") return Kind::kBf16;
  if (name == "f32") return Kind::kF32;
  throw std::invalid_argument("no kernels for scheme " + name);
}

Dtype dtype_of(const std::string& name) {
  if (name == "F16") return Dtype::kF16;
  if (name == "BF16") return Dtype::kBf16;
  if (name == "F32") return Dtype::kF32;
  throw std::invalid_argument("no such dtype: " + name);
}

const char* reason_of(Bad bad) {
  switch (bad) {
    case Bad::kNan:
      return "NaN";
    case Bad::kInfinite:
      return "infinity";
    case Bad::kScale:
      return "a scale beyond FP16";
    case Bad::kValue:
      return "a value beyond the range of its new type";
    default:
      return "";
  }
}

// Shape of a matrix, its parts still to come.
Matrix shape_of(const std::string& kind, int64_t n_rows, int64_t n_columns, int64_t group_size) {
  Matrix w;
  w.kind = kind_of(kind);
  require(n_rows > 0 && n_columns > 0 && n_rows < (int64_t{1} << 31) && n_columns < (int64_t{1} << 31),
          "empty or huge matrix");
  w.n_rows = n_rows;
  w.n_columns = n_columns;
  if (!is_float(w.kind)) {
    w.group_size = group_size == 0 ? n_columns : group_size;
    require(group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256,
            "group size is not one of 32, 64, 128, 256, 0");
  }
  return w;
}

template <class T, class Array>
auto* part_of(const Array& bytes, int64_t n, const char* what) {
  require(bytes.size() == static_cast<size_t>(n) * sizeof(T), what);
  require(reinterpret_cast<uintptr_t>(bytes.data()) % sizeof(T) == 0, "unaligned part");
  using Element = std::conditional_t<std::is_same_v<Array, Bytes>, const T, T>;
  return reinterpret_cast<Element*>(bytes.data());
}
constexpr const char* kWrongCodes = "codes: wrong number of bytes";
constexpr const char* kWrongScales = "scales: wrong number of bytes";
constexpr const char* kWrongValues = "values: wrong number of bytes";
constexpr const char* kWrongPoints = "zero_points: wrong number of bytes";
constexpr const char* kWrongOffsets = "offsets: wrong number of bytes";

// A matrix whose parts are these bytes; throws when they do not fit. Empty: the scheme has no such part.
struct MatrixParts {
  std::string kind;
  int64_t n_rows, n_columns, group_size;
  bool wide_scales;
  Bytes codes, scales, zero_points, offsets;

  Matrix matrix() const {
    Matrix w = shape_of(kind, n_rows, n_columns, group_size);
    const int64_t n_scales = w.n_tiles() * kTileRows * w.n_groups();
    w.lines = part_of<uint32_t>(codes, w.n_tiles() * kTileRows * w.n_lines(), kWrongCodes);
    w.wide_scales = wide_scales;
    const int64_t n_offsets = w.kind == Kind::kInt4o ? n_scales : 0;
    if (wide_scales) {
      w.scales = part_of<float>(scales, n_scales, kWrongScales);
      w.offsets = part_of<float>(offsets, n_offsets, kWrongOffsets);
    } else {
      w.scales = part_of<uint16_t>(scales, n_scales, kWrongScales);
      w.offsets = part_of<uint16_t>(offsets, n_offsets, kWrongOffsets);
    }
    const bool has_points = w.kind == Kind::kInt4z;
    const auto* points = part_of<uint8_t>(zero_points, has_points ? n_scales : 0, kWrongPoints);
    w.zero_points = has_points ? points : nullptr;
    return w;
  }
};

std::vector<float> padded_copy(const Floats& values) {
  std::vector<float> out(static_cast<size_t>(pad_to(static_cast<int64_t>(values.size()), kTileRows)), 0.0f);
  std::copy_n(values.data(), values.size(), out.begin());
  return out;
}

std::tuple<std::string, int64_t, int64_t, int64_t> convert(Pool& pool, const Bytes& values, const std::string& dtype,
                                                           int64_t n_rows, int64_t n_columns, const std::string& kind,
                                                           int64_t group_size, const MutableBytes& codes,
                                                           const MutableBytes& scales, const MutableBytes& zero_points) {
  const Matrix w = shape_of(kind, n_rows, n_columns, group_size);
  const int64_t n_scales = w.n_tiles() * kTileRows * w.n_groups();
  const bool has_points = w.kind == Kind::kInt4z;
  auto* const lines = part_of<uint32_t>(codes, w.n_tiles() * kTileRows * w.n_lines(), kWrongCodes);
  auto* const scale_bits = part_of<uint16_t>(scales, n_scales, kWrongScales);
  auto* const points = part_of<uint8_t>(zero_points, has_points ? n_scales : 0, kWrongPoints);
  const Dtype d = dtype_of(dtype);
  require(values.size() == static_cast<size_t>(n_rows) * static_cast<size_t>(n_columns * dtype_nbytes(d)), kWrongValues);
  const Kernels& k = kernels();
  BlockStatus s;
  {
    const nb::gil_scoped_release release;
    s = convert_block(k, pool, values.data(), d, n_rows, n_columns, w.kind, w.group_size, lines, scale_bits,
                      has_points ? points : nullptr);
  }
  return {reason_of(s.bad), s.row, s.column, s.n_underflowed};
}

void matmul(Pool& pool, const MatrixParts& parts, const FloatRows& x, const MutableFloatRows& y, int activation_bits) {
  const Matrix w = parts.matrix();
  const auto n = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require(width == pad_to(w.n_columns, kTileRows), "x: rows are not padded to 16");
  require(n > 0 && static_cast<int64_t>(y.shape(0)) == n, "y: wrong number of rows");
  require(static_cast<int64_t>(y.shape(1)) == w.n_tiles() * kTileRows, "y: rows are not padded to 16");
  require(activation_bits == 8 || activation_bits == 16, "activations have 8 or 16 bits");
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  Inputs inputs(activation_bits);
  inputs.plan(n, w.n_columns, {&w});
  for (int64_t m = 0; m < n; m++) inputs.put(k, x.data() + m * width, m);
  Buffer scratch;
  scratch.reserve(kScratchBytes * static_cast<size_t>(pool.n_threads()));
  constexpr int64_t kChunk = 8;
  pool.run((w.n_tiles() + kChunk - 1) / kChunk, [&](int64_t task, int thread) {
    inputs.multiply(k, w, y.data(), w.n_tiles() * kTileRows, task * kChunk, std::min(w.n_tiles(), (task + 1) * kChunk),
                    scratch.as<char>() + kScratchBytes * static_cast<size_t>(thread));
  });
}

void bound_dequantize(Pool& pool, const MatrixParts& parts, const MutableFloatRows& out) {
  const Matrix w = parts.matrix();
  require(static_cast<int64_t>(out.shape(0)) == w.n_rows && static_cast<int64_t>(out.shape(1)) == w.n_columns,
          "out: wrong shape");
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  dequantize(k, pool, w, out.data());
}

// signal, noise and cross, one array after another.
using MutableSums = nb::ndarray<double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
GroupSums sums_of(const MutableSums& sums, int64_t n_rows, int64_t n_columns, int64_t group_size) {
  require(group_size > 0, "group size: not positive");
  const int64_t n_groups = (n_columns + group_size - 1) / group_size;
  require(
      sums.shape(0) == 3 && static_cast<int64_t>(sums.shape(1)) == n_rows && static_cast<int64_t>(sums.shape(2)) == n_groups,
      "sums: wrong shape");
  const int64_t n = n_rows * n_groups;
  return {group_size, sums.data(), sums.data() + n, sums.data() + 2 * n};
}

std::tuple<double, bool> bound_compare(Pool& pool, const FloatRows& x, const FloatRows& y, int64_t group_size,
                                       const MutableSums& sums) {
  const auto n_rows = static_cast<int64_t>(x.shape(0)), n_columns = static_cast<int64_t>(x.shape(1));
  require(x.shape(0) == y.shape(0) && x.shape(1) == y.shape(1), "x and y: different shapes");
  const GroupSums out = sums_of(sums, n_rows, n_columns, group_size);
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  const RowDifference d = compare(k, pool, x.data(), y.data(), n_rows, n_columns, out);
  return {d.largest, d.equal};
}

std::tuple<double, bool, bool> bound_compare_with_source(Pool& pool, const Bytes& values, const std::string& dtype,
                                                         const MatrixParts& parts, bool remake, int64_t group_size,
                                                         const MutableSums& sums) {
  const Matrix w = parts.matrix();
  const Dtype d = dtype_of(dtype);
  require(values.size() == static_cast<size_t>(w.n_rows) * static_cast<size_t>(w.n_columns * dtype_nbytes(d)), kWrongValues);
  require(!remake || !w.wide_scales, "only FP16 scales are made");
  const GroupSums out = sums_of(sums, w.n_rows, w.n_columns, group_size);
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  const SourceDifference found = compare_with_source(k, pool, values.data(), d, w, remake, out);
  return {found.largest, found.equal, found.remade};
}

// Read all bytes once, in chunks claimed by the threads as products claim theirs.
uint32_t read_all(Pool& pool, const Bytes& data) {
  require(data.size() % 64 == 0 && reinterpret_cast<uintptr_t>(data.data()) % 4 == 0, "data: not whole lines");
  constexpr int64_t kChunk = int64_t{1} << 20;
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  const auto n = static_cast<int64_t>(data.size());
  std::atomic<uint32_t> out{0};
  pool.run((n + kChunk - 1) / kChunk,
           [&](int64_t task, int) { out ^= k.read(data.data() + task * kChunk, std::min(kChunk, n - task * kChunk)); });
  return out;
}

// Multiply from registers on every thread; returns the number of multiplications.
int64_t multiply_registers(Pool& pool, const std::string& operands) {
  require(operands == "int16" || operands == "int8" || operands == "float", "operands: neither int16, int8 nor float");
  const Kernels& k = kernels();
  const nb::gil_scoped_release release;
  std::atomic<int64_t> out{0};
  const auto peak = operands == "float" ? k.peak_float : operands == "int8" ? k.peak_bytes : k.peak_int;
  pool.run(64 * pool.n_threads(), [&](int64_t, int) { out += peak(); });
  return out;
}

// A Model behind a lock: one forward pass at a time.
struct BoundModel {
  Model model;
  std::mutex turn;
  bool ready = false;  // its shapes were checked after the last change
  BoundModel(ModelConfig config, int n_threads) : model(std::move(config), n_threads, kernels()) {}

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

void set_activation(ModelConfig& c, const std::string& name) {
  require(name == "silu" || name == "gelu_tanh" || name == "clamped_silu", "no such activation");
  c.activation = name == "silu" ? Activation::kSilu : name == "gelu_tanh" ? Activation::kGeluTanh : Activation::kClampedSilu;
}

BoundModel* new_model(const ModelConfig& c, int threads) {
  require(c.vocab_size > 0 && c.hidden_size > 0 && c.head_dim > 0, "sizes must be positive");
  require(c.n_kv_heads > 0 && c.n_heads > 0 && c.n_heads % c.n_kv_heads == 0, "heads are not a multiple of KV heads");
  for (const RopeFrequencies& r : c.ropes) require(2 * r.n_pairs <= c.head_dim, "more pairs than half of a head");
  require(c.activation_bits == 8 || c.activation_bits == 16, "activations have 8 or 16 bits");
  require(threads >= 1 && threads <= 1024, "threads: 1 to 1024");
  return new BoundModel(c, threads);
}

void set_linear(BoundModel& m, int64_t layer, int64_t expert, const std::string& part, const MatrixParts& parts) {
  m.ready = false;
  m.linear(layer, expert, part).weight = parts.matrix();
}

void set_bias(BoundModel& m, int64_t layer, int64_t expert, const std::string& part, const Floats& values) {
  m.ready = false;
  m.linear(layer, expert, part).bias = padded_copy(values);
}

void set_norm(BoundModel& m, int64_t layer, const std::string& part, const Floats& values) {
  m.ready = false;
  m.norm(layer, part) = {static_cast<int64_t>(values.size()), padded_copy(values)};
}

void set_sinks(BoundModel& m, int64_t layer, const Floats& values) {
  require(static_cast<int64_t>(values.size()) == m.model.config().n_heads, "sinks: not one a head");
  m.layer_at(layer).sinks.assign(values.data(), values.data() + values.size());
}

// Every matrix is there and has the shape that the layers before and after it ask for: the passes trust them.
void check_shapes(BoundModel& m) {
  const ModelConfig& c = m.model.config();
  const int64_t q_width = c.n_heads * c.head_dim, kv_width = c.n_kv_heads * c.head_dim;
  auto check = [](const Linear& l, int64_t n_rows, int64_t n_columns) {
    require(l.is_there() && l.weight.n_rows == n_rows && l.weight.n_columns == n_columns,
            "a matrix is missing or misshapen");
    require(l.bias.empty() || static_cast<int64_t>(l.bias.size()) == pad_to(n_rows, kTileRows), "a bias is misshapen");
  };
  auto check_norm = [](const Norm& norm, std::initializer_list<int64_t> sizes) {
    require(norm.n == 0 || std::find(sizes.begin(), sizes.end(), norm.n) != sizes.end(), "a norm is misshapen");
  };
  auto check_feed_forward = [&](const FeedForward& f) {
    const int64_t inner = f.down.weight.n_columns;
    check(f.down, c.hidden_size, inner);
    if (f.gate_up.is_there()) return check(f.gate_up, 2 * inner, c.hidden_size);
    check(f.gate, inner, c.hidden_size);
    check(f.up, inner, c.hidden_size);
  };
  for (int64_t i = 0; i < c.n_layers(); i++) {
    const Layer& l = m.model.layer(i);
    if (l.qkv.is_there()) {
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
    if (l->is_there()) check(*l, c.vocab_size, c.hidden_size);
  }
  check_norm(m.model.final_norm, {c.hidden_size});
  m.ready = true;
}

void require_ready(BoundModel& m, const Session& session) {
  require(m.ready, "check_shapes comes first");
  const ModelConfig& c = m.model.config();
  for (const LayerConfig& l : c.layers) {
    require(l.rope + session.rope_offset < static_cast<int64_t>(c.ropes.size()), "no such rope");
  }
}

void forward(BoundModel& m, Session& session, const Tokens& tokens, const MutableFloatRows& logits) {
  const ModelConfig& c = m.model.config();
  const auto n = static_cast<int64_t>(tokens.size()), n_out = static_cast<int64_t>(logits.shape(0));
  require_ready(m, session);
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(session.n_tokens() + n <= session.n_positions(), "no room in the session");
  require(m.model.embedding.is_there() && m.model.final_norm.n > 0, "no embedding or final norm");
  require(n_out == 1 || n_out == n, "logits: rows are neither 1 nor the number of tokens");
  require(static_cast<int64_t>(logits.shape(1)) == c.vocab_size, "logits: rows are not vocab_size long");
  for (size_t i = 0; i < tokens.size(); i++) {
    require(tokens.data()[i] >= 0 && tokens.data()[i] < c.vocab_size, "a token id is outside the vocabulary");
  }
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(m.turn);
  m.model.forward(session, tokens.data(), n, n_out == n, logits.data());
}

void restart_stopwatch(BoundModel& m) {
  const std::lock_guard<std::mutex> turn(m.turn);
  m.model.stopwatch.restart();
}

std::tuple<double, double, double, double> part_seconds(BoundModel& m) {
  const std::lock_guard<std::mutex> turn(m.turn);
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
               bool attended) {
  const ModelConfig& c = m.model.config();
  const auto n = static_cast<int64_t>(x.shape(0));
  require(layer >= 0 && layer < c.n_layers(), "no such layer");
  require_ready(m, session);
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(session.n_tokens() + n <= session.n_positions(), "no room in the session");
  require(static_cast<int64_t>(x.shape(1)) == pad_to(c.hidden_size, kTileRows), "x: rows are not padded to 16");
  require(until >= 0 && until <= static_cast<int>(Until::kEnd), "until: no such place");
  const Capture capture{capture_rows(qkv, n, c.hidden_size),
                        capture_rows(o, n, c.n_heads * c.head_dim),
                        capture_rows(gate_up, n, c.hidden_size),
                        capture_rows(down, n, m.model.layer(layer).mlp.down.weight.n_columns),
                        static_cast<Until>(until),
                        attended};
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(m.turn);
  m.model.run_layer(layer, session, n, x.data(), capture);
  if (layer + 1 == c.n_layers()) session.advance(n);
}

void finish(BoundModel& m, const FloatRows& x, const MutableFloatRows& logits) {
  const ModelConfig& c = m.model.config();
  const Linear& head = m.model.head.is_there() ? m.model.head : m.model.embedding;
  require(m.ready && head.is_there() && m.model.final_norm.n > 0, "no head or final norm, or check_shapes has to come");
  const auto n = static_cast<int64_t>(x.shape(0));
  require(n > 0 && n <= Model::kMaxTokens, "too many tokens in one call, or none");
  require(static_cast<int64_t>(x.shape(1)) == pad_to(c.hidden_size, kTileRows), "x: rows are not padded to 16");
  require(static_cast<int64_t>(logits.shape(0)) == n && static_cast<int64_t>(logits.shape(1)) == c.vocab_size,
          "logits: wrong shape");
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> turn(m.turn);
  m.model.finish(x.data(), n, logits.data());
}

void bound_products(Pool& pool, const FloatRows& a, const FloatRows& b, bool upper, const MutableFloatRows& out) {
  const auto n_k = static_cast<int64_t>(a.shape(0)), m = static_cast<int64_t>(a.shape(1));
  const auto n = static_cast<int64_t>(b.shape(1));
  require(static_cast<int64_t>(b.shape(0)) == n_k && static_cast<int64_t>(out.shape(0)) == m &&
              static_cast<int64_t>(out.shape(1)) == n && (!upper || m == n),
          "wrong shape");
  const nb::gil_scoped_release release;
  products(kernels(), pool, a.data(), b.data(), n_k, m, n, upper, out.data());
}

int64_t bound_factor(Pool& pool, const FloatRows& h, const Columns& columns, const Floats& diagonal,
                     const MutableFloatRows& unit, const MutableFloats& pivots) {
  const size_t n = columns.size();
  require(h.shape(0) == h.shape(1) && diagonal.size() == n && unit.shape(0) == n && unit.shape(1) == n && pivots.size() == n,
          "not a square matrix, or the wrong shape");
  for (size_t i = 0; i < n; i++) {
    require(columns.data()[i] >= 0 && static_cast<size_t>(columns.data()[i]) < h.shape(0), "no such column");
  }
  const nb::gil_scoped_release release;
  return factor(kernels(), pool, h.data(), static_cast<int64_t>(h.shape(0)), columns.data(), diagonal.data(),
                static_cast<int64_t>(n), unit.data(), pivots.data());
}

Grid grid_of(float span, bool is_shifted, const Floats& levels) {
  require(levels.size() == 0 || levels.size() == 16, "levels: neither 16 nor none");
  Grid grid{span, is_shifted, levels.size() == 16, {}, {}};
  for (size_t i = 0; i < levels.size(); i++) {
    grid.levels[i] = levels.data()[i];
    if (i > 0) grid.middles[i - 1] = (grid.levels[i - 1] + grid.levels[i]) / 2.0f;
  }
  return grid;
}

void bound_round(Pool& pool, const FloatTiles& w, const Tokens& group, const FloatTiles& scales, const FloatTiles& lows,
                 const FloatRows& factor, const Grid& grid, const MutableCodeTiles& q) {
  const size_t n_tiles = w.shape(0), n = w.shape(1), n_groups = scales.shape(1);
  require(w.shape(2) == 16 && scales.shape(2) == 16 && lows.shape(2) == 16 && q.shape(2) == 16, "tiles have 16 rows");
  require(scales.shape(0) == n_tiles && lows.shape(0) == n_tiles && lows.shape(1) == n_groups && q.shape(0) == n_tiles &&
              q.shape(1) == n,
          "scales, lows or codes: wrong shape");
  require(group.size() == n && factor.shape(0) == n && factor.shape(1) == n, "group or factor: wrong shape");
  for (size_t i = 0; i < n; i++) {
    require(group.data()[i] >= 0 && static_cast<size_t>(group.data()[i]) < n_groups, "no such group");
  }
  const nb::gil_scoped_release release;
  round_with_feedback(kernels(), pool, w.data(), static_cast<int64_t>(n_tiles), static_cast<int64_t>(n), group.data(),
                      scales.data(), lows.data(), static_cast<int64_t>(n_groups), factor.data(), grid, q.data());
}

void bound_solve(Pool& pool, const MutableFloatTiles& x, const FloatRows& factor, const Floats& pivots) {
  const size_t n = x.shape(1);
  require(x.shape(2) == 16 && factor.shape(0) == n && factor.shape(1) == n && pivots.size() == n, "wrong shape");
  const nb::gil_scoped_release release;
  solve_rows(kernels(), pool, x.data(), static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(n), factor.data(),
             pivots.data());
}

void bound_refine(Pool& pool, const FloatTiles& w, int64_t group_size, const FloatRows& h, const Grid& grid, int n_rounds,
                  const MutableHalfTiles& scales, const FloatTiles& lows, const MutableCodeTiles& q) {
  const auto n_tiles = static_cast<int64_t>(w.shape(0)), n = static_cast<int64_t>(w.shape(1));
  require(w.shape(2) == 16 && scales.shape(2) == 16 && q.shape(2) == 16, "tiles have 16 rows");
  require(n > 0 && group_size > 0 && group_size <= n, "group size: not between 1 and the columns");
  require(static_cast<int64_t>(h.shape(0)) == n && static_cast<int64_t>(h.shape(1)) == n, "h: wrong shape");
  require(static_cast<int64_t>(scales.shape(0)) == n_tiles && static_cast<int64_t>(q.shape(0)) == n_tiles &&
              static_cast<int64_t>(q.shape(1)) == n &&
              static_cast<int64_t>(scales.shape(1)) == (n + group_size - 1) / group_size &&
              lows.shape(0) == scales.shape(0) && lows.shape(1) == scales.shape(1) && lows.shape(2) == 16,
          "scales, lows or codes: wrong shape");
  if (grid.is_codebook) {
    for (size_t i = 0; i < q.size(); i++) require(q.data()[i] >= 0 && q.data()[i] < 16, "no such level");
  }
  const nb::gil_scoped_release release;
  refine(kernels(), pool, w.data(), n_tiles, n, group_size, h.data(), grid, n_rounds, scales.data(), lows.data(), q.data());
}

void bound_search(Pool& pool, const FloatTiles& w, int64_t group_size, const FloatTiles& factors, const Floats& pivots,
                  const FloatRows& multipliers, const Grid& grid, const MutableHalfTiles& scales,
                  const MutableFloatTiles& lows, const MutableFloatTiles& errors) {
  const auto n_tiles = static_cast<int64_t>(w.shape(0)), n = static_cast<int64_t>(w.shape(1));
  require(w.shape(2) == 16 && scales.shape(2) == 16 && lows.shape(2) == 16 && errors.shape(2) == 16, "tiles have 16 rows");
  require(multipliers.shape(1) == 2, "multipliers: not two a candidate");
  require(n > 0 && group_size > 0 && group_size <= n, "group size: not between 1 and the columns");
  const int64_t n_groups = (n + group_size - 1) / group_size;
  require(static_cast<int64_t>(factors.shape(1)) == group_size && static_cast<int64_t>(factors.shape(2)) == group_size &&
              (factors.shape(0) == 0 || static_cast<int64_t>(factors.shape(0)) == n_groups) &&
              static_cast<int64_t>(pivots.size()) == n,
          "factors or pivots: wrong shape");
  for (const auto& [tiles, groups] : {std::pair{scales.shape(0), scales.shape(1)}, std::pair{lows.shape(0), lows.shape(1)},
                                      std::pair{errors.shape(0), errors.shape(1)}}) {
    require(static_cast<int64_t>(tiles) == n_tiles && static_cast<int64_t>(groups) == n_groups,
            "scales, lows or errors: wrong shape");
  }
  const nb::gil_scoped_release release;
  search_scales(kernels(), pool, w.data(), n_tiles, n, group_size, factors.shape(0) == 0 ? nullptr : factors.data(),
                pivots.data(), multipliers.data(), static_cast<int64_t>(multipliers.shape(0)), grid, scales.data(),
                lows.data(), errors.data());
}

class BoundVocabulary {
 public:
  explicit BoundVocabulary(nb::bytes document)
      : document_(std::move(document)), own_({document_.c_str(), document_.size()}) {}
  nb::bytes shortened(const std::string& seen, const std::unordered_set<std::string>& kept, const std::string& more) const {
    const std::string out = own_.shortened(seen, kept, more);
    return nb::bytes(out.data(), out.size());
  }
  std::optional<nb::bytes> token(int64_t id) const {
    const std::optional<std::string> found = own_.token(id);
    return found ? std::optional(nb::bytes(found->data(), found->size())) : std::nullopt;
  }
  std::optional<int64_t> id(const std::string& token) const { return own_.id(token); }
  size_t size() const { return own_.size(); }

 private:
  nb::bytes document_;
  Vocabulary own_;
};

bool cut(Session& s, int64_t n) {
  require(n >= 0 && n <= s.n_tokens(), "a session can only be cut to fewer tokens");
  return s.truncate(n);
}

KvConfig kv_config(int64_t n_positions, const std::string& kind, int64_t window) {
  require(kind == "f16" || kind == "f32" || kind == "int8", "keys and values are f16, f32 or int8");
  require(n_positions > 0 && n_positions < (int64_t{1} << 31) && window >= 0, "positions or window: out of range");
  return {n_positions, kind == "f16" ? KvKind::kF16 : kind == "f32" ? KvKind::kF32 : KvKind::kInt8, window};
}

}  // namespace
}  // namespace w4conv

NB_MODULE(_native, m) {
  using namespace w4conv;
  m.doc() = "Kernels and engine of w4conv; call them through w4conv.kernels and w4conv.runtime.";
  nb::set_leak_warnings(false);  // objects that live as long as the interpreter are no fault
  m.attr("BUILD") = W4CONV_BUILD;
  m.attr("MAX_TOKENS") = Model::kMaxTokens;
  m.def("isa_tiers", [] {
    std::vector<std::string> names;
    for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
    return names;
  });
  m.def("isa_tier", [] { return std::string(kernels().name); });
  m.def("dot_instruction", [] { return std::string(kernels().dot_name()); });

  nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "n_threads"_a);
  m.def("convert", &convert, "pool"_a, "values"_a, "dtype"_a, "n_rows"_a, "n_columns"_a, "kind"_a, "group_size"_a, "codes"_a,
        "scales"_a, "zero_points"_a);
  nb::class_<MatrixParts>(m, "MatrixParts")
      .def(
          "__init__",
          [](MatrixParts* p, std::string kind, int64_t n_rows, int64_t n_columns, int64_t group_size, bool wide_scales,
             Bytes codes, Bytes scales, Bytes zero_points, Bytes offsets) {
            new (p) MatrixParts{std::move(kind),   n_rows,           n_columns,         group_size,
                                wide_scales,       std::move(codes), std::move(scales), std::move(zero_points),
                                std::move(offsets)};
          },
          "kind"_a, "n_rows"_a, "n_columns"_a, "group_size"_a, "wide_scales"_a, "codes"_a, "scales"_a, "zero_points"_a,
          "offsets"_a);
  m.def("dequantize", &bound_dequantize, "pool"_a, "parts"_a, "out"_a);
  m.def("compare", &bound_compare, "pool"_a, "x"_a, "y"_a, "group_size"_a, "sums"_a);
  m.def("compare_with_source", &bound_compare_with_source, "pool"_a, "values"_a, "dtype"_a, "parts"_a, "remake"_a,
        "group_size"_a, "sums"_a);
  m.def("matmul", &matmul, "pool"_a, "parts"_a, "x"_a, "y"_a, "activation_bits"_a);

  m.def("products", &bound_products, "pool"_a, "a"_a, "b"_a, "upper"_a, "out"_a);
  m.def("factor", &bound_factor, "pool"_a, "h"_a, "columns"_a, "diagonal"_a, "unit"_a, "pivots"_a);
  nb::class_<Grid>(m, "Grid").def(
      "__init__",
      [](Grid* self, float span, bool is_shifted, const Floats& levels) {
        new (self) Grid(grid_of(span, is_shifted, levels));
      },
      "span"_a, "is_shifted"_a, "levels"_a);
  m.def("round_with_feedback", &bound_round, "pool"_a, "w"_a, "group"_a, "scales"_a, "lows"_a, "factor"_a, "grid"_a, "q"_a);
  m.def("solve_rows", &bound_solve, "pool"_a, "x"_a, "factor"_a, "pivots"_a);
  m.def("refine", &bound_refine, "pool"_a, "w"_a, "group_size"_a, "h"_a, "grid"_a, "n_rounds"_a, "scales"_a, "lows"_a,
        "q"_a);
  m.def("search_scales", &bound_search, "pool"_a, "w"_a, "group_size"_a, "factors"_a, "pivots"_a, "multipliers"_a, "grid"_a,
        "scales"_a, "lows"_a, "errors"_a);

  nb::class_<BoundVocabulary>(m, "Vocabulary")
      .def(nb::init<nb::bytes>(), "document"_a)
      .def("shortened", &BoundVocabulary::shortened, "seen"_a, "kept"_a, "more"_a)
      .def("token", &BoundVocabulary::token, "id"_a)
      .def("id", &BoundVocabulary::id, "token"_a)
      .def("__len__", &BoundVocabulary::size);

  m.def("explain_lost_pages", &explain_lost_pages);
  m.def("read", &read_all, "pool"_a, "data"_a);
  m.def("multiply_registers", &multiply_registers, "pool"_a, "operands"_a);

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
      .def("restart_stopwatch", &restart_stopwatch)
      .def("part_seconds", &part_seconds)
      .def("forward", &forward, "session"_a, "tokens"_a, "logits"_a)
      .def("finish", &finish, "x"_a, "logits"_a)
      .def("run_layer", &run_layer, "session"_a, "layer"_a, "x"_a, "qkv"_a, "o"_a, "gate_up"_a, "down"_a, "until"_a,
           "attended"_a);
  m.def("new_model", &new_model, "config"_a, "threads"_a, nb::rv_policy::take_ownership);
}
