// Coverage-guided fuzzing of the reader of vocabularies by libFuzzer:
//
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I native/src -o vocabulary_fuzzer
//         tests/fuzz/vocabulary_fuzzer.cpp native/src/vocabulary.cpp
//     ./vocabulary_fuzzer corpus
#include <cstdlib>
#include <stdexcept>

#include "vocabulary.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Memory of its own size, so that a byte read too far is seen.
  const std::vector<char> exact(data, data + size);
  const std::string_view document(exact.data(), size);
  try {
    const w4conv::Vocabulary vocabulary(document);
    const auto n = static_cast<int64_t>(vocabulary.n_ids());
    size_t n_tokens = 0;
    for (int64_t id = -1; id <= n; ++id) {
      const auto token = vocabulary.token(id);
      if (token && vocabulary.id(*token) != id) std::abort();
      n_tokens += token.has_value();
      if (id > 1000) id = n - 1;  // a high id alone is no work
    }
    if (n <= 1000 && n_tokens != vocabulary.size()) std::abort();
    const std::string some = vocabulary.shortened("the text", {"a", "<s>"}, "\"more\": 1");
    const std::string all = vocabulary.shortened(document, {}, "");
    if (all.size() > size || some.size() > size + 10) std::abort();
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
