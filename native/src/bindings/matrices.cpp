#include "bindings/bindings.h"

#include <type_traits>

#include "ops/convert.h"
#include "ops/dequantize.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The one list of kinds by name.
Kind kind_of(const std::string& name) {
  if (name == "int4") return Kind::kInt4;
  if (name == "int4z") return Kind::kInt4z;
  if (name == "int4o") return Kind::kInt4o;
  if (name == "nf4") return Kind::kNf4;
  if (name == "fp4") return Kind::kFp4;
  if (name == "e2m1") return Kind::kE2m1;
  if (name == "iq4nl") return Kind::kIq4nl;
  if (name == "nl4") return Kind::kNl4;
  if (name == "nl3") return Kind::kNl3;
  if (name == "int8") return Kind::kInt8;
  if (name == "int8o") return Kind::kInt8o;
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

const char* reason_of(Status status) {
  switch (status) {
    case Status::kNan:
      return "NaN";
    case Status::kInfinite:
      return "infinity";
    case Status::kScale:
      return "a scale beyond FP16";
    case Status::kValue:
      return "a value beyond the range of its new type";
    case Status::kOk:
      return "";
  }
  throw std::logic_error("no such status");
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
    require(group_size == 0 || (group_size >= 16 && group_size <= 256 && (group_size & (group_size - 1)) == 0),
            "group size is not one of 16, 32, 64, 128, 256, 0");
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
constexpr const char* kWrongSupers = "super scales: wrong number of bytes";

ScaleType scale_type_of(const std::string& name) {
  if (name == "f16" || name.empty()) return ScaleType::kF16;  // floats have none
  if (name == "f32") return ScaleType::kF32;
  if (name == "i8") return ScaleType::kInt8;
  if (name == "s6") return ScaleType::kShifted;
  throw std::invalid_argument("no such type of scales: " + name);
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
    const WithoutGil without_gil;
    s = convert_block(k, pool, values.data(), d, n_rows, n_columns, w.kind, w.group_size, lines, scale_bits,
                      has_points ? points : nullptr);
  }
  return {reason_of(s.status), s.row, s.column, s.n_underflowed};
}

void bound_dequantize(Pool& pool, const MatrixParts& parts, const MutableFloatRows& out) {
  const Matrix w = parts.matrix();
  require(static_cast<int64_t>(out.shape(0)) == w.n_rows && static_cast<int64_t>(out.shape(1)) == w.n_columns,
          "out: wrong shape");
  const Kernels& k = kernels();
  const WithoutGil without_gil;
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
  const WithoutGil without_gil;
  const RowDifference d = compare(k, pool, x.data(), y.data(), n_rows, n_columns, out);
  return {d.largest, d.equal};
}

std::tuple<double, bool, bool> bound_compare_with_source(Pool& pool, const Bytes& values, const std::string& dtype,
                                                         const MatrixParts& parts, bool reproduce, int64_t group_size,
                                                         const MutableSums& sums) {
  const Matrix w = parts.matrix();
  const Dtype d = dtype_of(dtype);
  require(values.size() == static_cast<size_t>(w.n_rows) * static_cast<size_t>(w.n_columns * dtype_nbytes(d)), kWrongValues);
  require(!reproduce || w.scale_type == ScaleType::kF16, "only FP16 scales are made");
  const GroupSums out = sums_of(sums, w.n_rows, w.n_columns, group_size);
  const Kernels& k = kernels();
  const WithoutGil without_gil;
  const SourceDifference found = compare_with_source(k, pool, values.data(), d, w, reproduce, out);
  return {found.largest, found.equal, found.reproduced};
}

}  // namespace

Matrix MatrixParts::matrix() const {
  Matrix w = shape_of(kind, n_rows, n_columns, group_size);
  const int64_t n_scales = w.n_tiles() * kTileRows * w.n_groups();
  w.lines = part_of<uint32_t>(codes, w.n_tiles() * kTileRows * w.n_lines(), kWrongCodes);
  w.scale_type = scale_type_of(scale_type);
  const int64_t n_offsets = has_offsets(w.kind) ? n_scales : 0;
  if (w.scale_type == ScaleType::kF32) {
    w.scales = part_of<float>(scales, n_scales, kWrongScales);
    w.offsets = part_of<float>(offsets, n_offsets, kWrongOffsets);
  } else if (w.scale_type == ScaleType::kF16) {
    w.scales = part_of<uint16_t>(scales, n_scales, kWrongScales);
    w.offsets = part_of<uint16_t>(offsets, n_offsets, kWrongOffsets);
  } else {
    require(group_size >= 16 && group_size <= 128, "bytes as scales are those of groups of 16 to 128");
    w.scales = part_of<int8_t>(scales, n_scales, kWrongScales);
    w.offsets = part_of<int8_t>(offsets, n_offsets, kWrongOffsets);
  }
  const int64_t n_supers = w.n_tiles() * kTileRows * w.n_supers();
  w.super_scales = part_of<uint16_t>(super_scales, n_supers, kWrongSupers);
  w.super_offsets = part_of<uint16_t>(super_offsets, has_offsets(w.kind) ? n_supers : 0, kWrongSupers);
  const bool has_points = w.kind == Kind::kInt4z;
  const auto* points = part_of<uint8_t>(zero_points, has_points ? n_scales : 0, kWrongPoints);
  w.zero_points = has_points ? points : nullptr;
  return w;
}

void register_matrices(nb::module_& m) {
  nb::class_<MatrixParts>(m, "MatrixParts")
      .def(
          "__init__",
          [](MatrixParts* p, std::string kind, int64_t n_rows, int64_t n_columns, int64_t group_size, std::string scale_type,
             Bytes codes, Bytes scales, Bytes zero_points, Bytes offsets, Bytes super_scales, Bytes super_offsets) {
            new (p) MatrixParts{std::move(kind),
                                n_rows,
                                n_columns,
                                group_size,
                                std::move(scale_type),
                                std::move(codes),
                                std::move(scales),
                                std::move(zero_points),
                                std::move(offsets),
                                std::move(super_scales),
                                std::move(super_offsets)};
          },
          "kind"_a, "n_rows"_a, "n_columns"_a, "group_size"_a, "scale_type"_a, "codes"_a, "scales"_a, "zero_points"_a,
          "offsets"_a, "super_scales"_a, "super_offsets"_a);
  m.def("convert", &convert, "pool"_a, "values"_a, "dtype"_a, "n_rows"_a, "n_columns"_a, "kind"_a, "group_size"_a, "codes"_a,
        "scales"_a, "zero_points"_a);
  m.def("dequantize", &bound_dequantize, "pool"_a, "parts"_a, "out"_a);
  m.def("compare", &bound_compare, "pool"_a, "x"_a, "y"_a, "group_size"_a, "sums"_a);
  m.def("compare_with_source", &bound_compare_with_source, "pool"_a, "values"_a, "dtype"_a, "parts"_a, "reproduce"_a,
        "group_size"_a, "sums"_a);
}

}  // namespace w4conv::bindings
