#include "vocabulary.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/unordered_set.h>

#include <optional>

#include "bindings/bindings.h"

using namespace nb::literals;

namespace w4conv::bindings {
namespace {

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
  size_t n_ids() const { return own_.n_ids(); }

 private:
  nb::bytes document_;
  Vocabulary own_;
};

}  // namespace

void register_vocabulary(nb::module_& m) {
  nb::class_<BoundVocabulary>(m, "Vocabulary")
      .def(nb::init<nb::bytes>(), "document"_a)
      .def("shortened", &BoundVocabulary::shortened, "seen"_a, "kept"_a, "more"_a)
      .def("token", &BoundVocabulary::token, "id"_a)
      .def("id", &BoundVocabulary::id, "token"_a)
      .def("__len__", &BoundVocabulary::size)
      .def_prop_ro("n_ids", &BoundVocabulary::n_ids);
}

}  // namespace w4conv::bindings
