// The vocabulary and the merges of a tokenizer.json whose model is BPE, found without building the model.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace w4conv {

class Vocabulary {
 public:
  // document: JSON with one object "vocab" of tokens and ids, and one array "merges", in its object "model"; it outlives
  // this. Throws std::invalid_argument where it is anything else, and where a token or an id comes twice.
  explicit Vocabulary(std::string_view document);

  // The document with fewer tokens and merges, the rest as it is: only tokens in `kept`, tokens all of whose runs of three
  // bytes are in `seen`, and merges into such. more: members for "vocab" besides.
  std::string shortened(std::string_view seen, const std::unordered_set<std::string>& kept, std::string_view more) const;

  std::optional<std::string> token(int64_t id) const;
  std::optional<int64_t> id(std::string_view token) const;
  size_t size() const { return tokens_.size(); }
  size_t n_ids() const { return by_id_.size(); }  // one more than the highest

 private:
  struct Span {
    uint32_t begin, end;
  };
  struct Token {
    Span entry;        // with its id
    uint32_t n_bytes;  // of the string, as it is written, without quotes
    uint32_t id, hash;
  };
  std::string_view at(Span s) const { return document_.substr(s.begin, s.end - s.begin); }
  std::string_view text(const Token& token, std::string& buffer) const;
  // Of the token or, where there is none, of a free place, in places_.
  size_t place_of(std::string_view token) const;

  std::string_view document_;
  Span vocab_{}, merges_{};  // inside of their brackets
  std::vector<Token> tokens_;
  std::vector<Span> merge_entries_;
  std::vector<int32_t> by_id_, places_;  // indices in tokens_, or -1; places_ is a hash table
};

}  // namespace w4conv
