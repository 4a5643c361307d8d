// Inputs: M rows made ready for the GEMMs that share them, in each form that those need.
#pragma once
#include <initializer_list>
#include <vector>

#include "ops/buffer.h"
#include "w4conv/kernels.h"

namespace w4conv {

class Inputs {
 public:
  // bits: of the activations where they become integers, 16 or 8.
  explicit Inputs(int bits = 16) : bits_(bits) {}

  // Make room for n_tokens rows of n_columns, for GEMMs with these matrices; those without lines are passed over.
  void plan(int64_t n_tokens, int64_t n_columns, std::initializer_list<const Matrix*> matrices) {
    n_forms_ = 0;
    for (const Matrix* w : matrices) {
      if (w->lines == nullptr || find(*w) != nullptr) continue;
      if (n_forms_ == static_cast<int>(forms_.size())) forms_.emplace_back();
      Form& f = forms_[n_forms_++];
      f.is_float = is_float(w->kind);
      if (f.is_float) {
        f.floats = {n_tokens, n_columns, nullptr};
        f.floats.values = f.buffer.reserve_for<float>(n_tokens * f.floats.n_padded());
      } else {
        IntActivations& a = f.ints;
        a = {n_tokens,           n_columns, w->block(), bits_of(*w), entries_of(w->kind),
             factor_of(w->kind), nullptr,   nullptr,    nullptr};
        const int64_t n_scales = n_tokens * a.n_blocks();
        a.dwords = f.buffer.reserve_for<uint32_t>(n_tokens * a.n_dwords() + 2 * n_scales);
        a.scales = reinterpret_cast<float*>(a.dwords + n_tokens * a.n_dwords());
        a.neg8_sums = reinterpret_cast<int32_t*>(a.scales + n_scales);
      }
    }
  }
  // Row m: padded to a multiple of 16 floats with zeros. Rows may be put at the same time.
  void put(const Kernels& k, const float* row, int64_t m) {
    for (int i = 0; i < n_forms_; i++) {
      forms_[i].is_float ? k.prepare_float(row, m, forms_[i].floats) : k.prepare_int(row, m, forms_[i].ints);
    }
  }
  void multiply(const Kernels& k, const Matrix& w, float* y, int64_t ldy, int64_t tile_begin, int64_t tile_end,
                void* scratch) const {
    const Form& f = *find(w);
    f.is_float ? k.matmul_float(w, f.floats, y, ldy, tile_begin, tile_end, scratch)
               : k.matmul_int(w, f.ints, y, ldy, tile_begin, tile_end, scratch);
  }

 private:
  struct Form {
    bool is_float = false;
    IntActivations ints;
    FloatActivations floats;
    Buffer buffer;
  };
  // Levels wider than a byte gain nothing by shorter activations.
  int bits_of(const Matrix& w) const { return entries_of(w.kind) == Entries::kWords ? 16 : bits_; }
  const Form* find(const Matrix& w) const {
    for (int i = 0; i < n_forms_; i++) {
      const Form& f = forms_[i];
      if (f.is_float != is_float(w.kind)) continue;
      if (f.is_float ||
          (f.ints.block == w.block() && f.ints.entries == entries_of(w.kind) && f.ints.factor == factor_of(w.kind))) {
        return &f;
      }
    }
    return nullptr;
  }
  int bits_;
  std::vector<Form> forms_;
  int n_forms_ = 0;
};

}  // namespace w4conv
