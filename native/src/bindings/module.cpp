#include "bindings/bindings.h"
#include "sigbus.h"

NB_MODULE(_native, m) {
  using namespace w4conv;
  using namespace nb::literals;
  m.doc() = "Kernels and engine of w4conv; call them through w4conv.kernels and w4conv.runtime.";
  nb::set_leak_warnings(false);  // objects that live as long as the interpreter are no fault
  m.attr("BUILD") = W4CONV_BUILD;
  m.def("isa_tiers", [] {
    std::vector<std::string> names;
    for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
    return names;
  });
  m.def("isa_tier", [] { return std::string(kernels().name); });
  m.def("dot_instruction", [] { return std::string(kernels().dot_name()); });
  m.def("explain_sigbus", &explain_sigbus);
  nb::exception<ThreadStartError>(m, "ThreadStartError", PyExc_RuntimeError);
  nb::class_<Pool>(m, "Pool").def(
      "__init__",
      [](Pool* p, int n_threads) {
        bindings::require(n_threads >= 1 && n_threads <= 1024, "threads: 1 to 1024");
        new (p) Pool(n_threads);
      },
      "n_threads"_a);
  bindings::register_matrices(m);
  bindings::register_matmul(m);
  bindings::register_calibration(m);
  bindings::register_engine(m);
  bindings::register_sampling(m);
  bindings::register_vocabulary(m);
}
