// The Python face of the native code, a file for each subject: shapes are checked here, the code behind trusts them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "ops/pool.h"
#include "w4conv/cpu.h"

namespace nb = nanobind;

namespace w4conv::bindings {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableFloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Other threads run Python while this stands. A daemon thread that wants to go on when the interpreter has ended is unwound
// by CPython, which may not go through frames of C++: it stays here until the process ends.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// A matrix whose parts are these bytes; throws when they do not fit. Empty: the scheme has no such part.
struct MatrixParts {
  std::string kind;
  int64_t n_rows, n_columns, group_size;
  std::string scale_type;
  Bytes codes, scales, zero_points, offsets, super_scales, super_offsets;

  Matrix matrix() const;
};

// Each adds the functions and classes of its file.
void register_matrices(nb::module_& m);  // coding, decoding, comparing; first, as others take its MatrixParts
void register_matmul(nb::module_& m);    // and the ceilings that they are held against
void register_calibration(nb::module_& m);
void register_engine(nb::module_& m);
void register_sampling(nb::module_& m);
void register_vocabulary(nb::module_& m);

}  // namespace w4conv::bindings
