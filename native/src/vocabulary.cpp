#include "vocabulary.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

namespace w4conv {
namespace {

constexpr uint32_t kMaxId = 1 << 24;
constexpr int kMaxDepth = 64;
// From where a token should be in the hash table. Half of it is free, so that a few dozen is far; tokens that were made to
// collide would be as many to go through for each.
constexpr size_t kMaxDistance = 1000;

[[noreturn]] void refuse() { throw std::invalid_argument("not a tokenizer.json of byte pairs"); }

// Walks through JSON, and looks only at what is asked for.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  size_t position() const { return at_; }
  char peek() {
    size_t i = at_;
    while (i < text_.size() && (text_[i] == ' ' || text_[i] == '\n' || text_[i] == '\r' || text_[i] == '\t')) ++i;
    at_ = i;
    return i < text_.size() ? text_[i] : '\0';
  }
  void expect(char c) {
    if (peek() != c) refuse();
    ++at_;
  }
  // As it is written, without quotes.
  std::string_view string() {
    expect('"');
    size_t i = at_;
    while (i < text_.size() && text_[i] != '"') i += text_[i] == '\\' ? 2 : 1;
    if (i >= text_.size()) refuse();
    const std::string_view found = text_.substr(at_, i - at_);
    at_ = i + 1;
    return found;
  }
  uint32_t natural() {
    peek();
    const size_t begin = at_;
    uint32_t n = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && n < kMaxId; ++at_)
      n = 10 * n + (text_[at_] - '0');
    if (at_ == begin || n >= kMaxId) refuse();
    return n;
  }
  // each(key) reads the value.
  template <typename F>
  void object(F each) {
    sequence('{', '}', [&] {
      const std::string_view key = string();
      expect(':');
      each(key);
    });
  }
  template <typename F>
  void array(F each) {
    sequence('[', ']', each);
  }
  void skip(int depth = 0) {
    if (depth > kMaxDepth) refuse();
    switch (peek()) {
      case '{':
        return object([&](std::string_view) { skip(depth + 1); });
      case '[':
        return array([&] { skip(depth + 1); });
      case '"':
        return (void)string();
      default:
        const size_t begin = at_;
        while (at_ < text_.size() && std::string_view(",]} \n\r\t").find(text_[at_]) == std::string_view::npos) ++at_;
        if (at_ == begin) refuse();
    }
  }

 private:
  template <typename F>
  void sequence(char open, char close, F each) {
    expect(open);
    if (peek() != close) {
      for (each(); peek() == ','; each()) ++at_;
    }
    expect(close);
  }

  std::string_view text_;
  size_t at_ = 0;
};

uint32_t hex4(std::string_view digits) {
  uint32_t n = 0;
  if (digits.size() < 4) refuse();
  for (int i = 0; i < 4; ++i) {
    const char c = digits[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) refuse();
    n = n << 4 | digit;
  }
  return n;
}

void append_utf8(std::string& out, uint32_t c) {
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) return (void)(out += static_cast<char>(c));
  if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    tail(6);
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    tail(12);
    tail(6);
  }
  tail(0);
}

// Appends what a JSON string stands for (RFC 8259, 7).
void append_text(std::string& out, std::string_view s) {
  for (size_t escape; (escape = s.find('\\')) != std::string_view::npos;) {
    out += s.substr(0, escape);
    const char kind = escape + 1 < s.size() ? s[escape + 1] : '\0';
    s.remove_prefix(std::min(s.size(), escape + 2));
    constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    if (const size_t plain = from.find(kind); kind != '\0' && plain != std::string_view::npos) {
      out += to[plain];
      continue;
    }
    if (kind != 'u') refuse();
    uint32_t c = hex4(s);
    s.remove_prefix(4);
    if (c >= 0xD800 && c < 0xE000) {  // the first half of a pair
      if (c >= 0xDC00 || !s.starts_with("\\u")) refuse();
      const uint32_t low = hex4(s.substr(2));
      if (low < 0xDC00 || low >= 0xE000) refuse();
      s.remove_prefix(6);
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, c);
  }
  out += s;
}

// What a JSON string stands for, in `buffer` if it is not written just so.
std::string_view text_of(std::string_view s, std::string& buffer) {
  if (s.find('\\') == std::string_view::npos) return s;
  buffer.clear();
  append_text(buffer, s);
  return buffer;
}

// FNV-1a.
uint32_t hash_of(std::string_view s) {
  uint32_t hash = 0x811C9DC5;
  for (const char c : s) hash = (hash ^ static_cast<unsigned char>(c)) * 0x01000193;
  return hash;
}

// The runs of three bytes of a text; some that it does not have are taken for its own.
class Runs {
 public:
  explicit Runs(std::string_view text) : seen_(kSlots) {
    for (size_t i = 2; i < text.size(); ++i) seen_[slot(&text[i - 2])] = true;
  }
  bool has_all(std::string_view s) const {
    for (size_t i = 2; i < s.size(); ++i) {
      if (!seen_[slot(&s[i - 2])]) return false;
    }
    return true;
  }
  // false: no JSON string that begins here has them all, which is soon seen of most.
  bool may_have_all(const char* s) const {
    for (int i = 0; i < 3; ++i) {
      if (s[i] == '\\' || s[i] == '"' || s[i] == ' ') return true;
    }
    return seen_[slot(s)];
  }

 private:
  static constexpr int kBits = 18, kSlots = 1 << kBits;
  static uint32_t slot(const char* p) {
    const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<unsigned char>(p[i])); };
    return (byte(0) << 16 | byte(1) << 8 | byte(2)) * 0x9E3779B1u >> (32 - kBits);
  }
  std::vector<bool> seen_;
};

}  // namespace

Vocabulary::Vocabulary(std::string_view document) : document_(document) {
  if (document.size() > std::numeric_limits<uint32_t>::max()) refuse();
  int n_models = 0, n_vocabs = 0, n_merges = 0;
  Reader json(document);
  const auto here = [&] { return static_cast<uint32_t>(json.position()); };
  const auto inside = [&](uint32_t begin) { return Span{begin + 1, here() - 1}; };  // of the brackets of what was read
  std::string buffer;
  const auto model_part = [&](std::string_view key) {
    json.peek();
    const uint32_t begin = here();
    if (key == "vocab") {
      ++n_vocabs;
      json.object([&](std::string_view token) {
        const auto start = static_cast<uint32_t>(token.data() - document.data() - 1);
        const uint32_t id = json.natural(), hash = hash_of(text_of(token, buffer));
        tokens_.push_back({{start, here()}, static_cast<uint32_t>(token.size()), id, hash});
      });
      vocab_ = inside(begin);
    } else if (key == "merges") {
      ++n_merges;
      json.array([&] {
        json.peek();
        const uint32_t start = here();
        json.skip();
        merge_entries_.push_back({start, here()});
      });
      merges_ = inside(begin);
    } else {
      json.skip();
    }
  };
  json.object([&](std::string_view key) {
    if (key != "model") return json.skip();
    ++n_models;
    json.object(model_part);
  });
  if (json.peek() != '\0' || n_models != 1 || n_vocabs != 1 || n_merges != 1) refuse();
  places_.assign(std::bit_ceil(2 * tokens_.size() + 1), -1);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const Token& token = tokens_[i];
    const size_t place = place_of(text(token, buffer));
    if (((place - token.hash) & (places_.size() - 1)) > kMaxDistance) refuse();
    if (token.id >= by_id_.size()) by_id_.resize(token.id + 1, -1);
    if (places_[place] >= 0 || by_id_[token.id] >= 0) refuse();
    places_[place] = by_id_[token.id] = static_cast<int32_t>(i);
  }
}

std::string_view Vocabulary::text(const Token& token, std::string& buffer) const {
  return text_of(document_.substr(token.entry.begin + 1, token.n_bytes), buffer);
}

size_t Vocabulary::place_of(std::string_view token) const {
  const uint32_t hash = hash_of(token);
  std::string buffer;
  for (size_t place = hash & (places_.size() - 1);; place = (place + 1) & (places_.size() - 1)) {
    if (places_[place] < 0) return place;
    const Token& there = tokens_[places_[place]];
    if (there.hash == hash && text(there, buffer) == token) return place;
  }
}

std::string Vocabulary::shortened(std::string_view seen, const std::unordered_set<std::string>& kept,
                                  std::string_view more) const {
  const Runs runs(seen);
  std::vector<bool> is_kept(tokens_.size());
  for (const std::string& token : kept) {
    if (const int32_t index = places_[place_of(token)]; index >= 0) is_kept[index] = true;
  }
  std::string vocab, merges, buffer;
  const auto add = [&](std::string& to, Span entry) {
    if (!to.empty()) to += ',';
    to += at(entry);
  };
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const Span entry = tokens_[i].entry;
    const bool is_seen = runs.may_have_all(&document_[entry.begin + 1]) && runs.has_all(text(tokens_[i], buffer));
    if (is_kept[i] || is_seen) add(vocab, entry);
  }
  std::string merged;
  for (const Span entry : merge_entries_) {  // "a b" or ["a", "b"]
    const std::string_view raw = at(entry);
    if (const size_t quote = raw.find('"'); quote + 3 < raw.size() && !runs.may_have_all(&raw[quote + 1])) continue;
    Reader json(raw);
    merged.clear();
    bool seen_each = true;
    const auto look = [&](std::string_view s) {
      seen_each = seen_each && runs.has_all(s);
      if (seen_each) merged += s;
    };
    if (json.peek() == '"') {
      const std::string_view both = text_of(json.string(), buffer);
      const size_t space = std::min(both.find(' '), both.size());
      look(both.substr(0, space));
      look(both.substr(std::min(space + 1, both.size())));
    } else {
      json.array([&] { look(text_of(json.string(), buffer)); });
    }
    if (seen_each && runs.has_all(merged)) add(merges, entry);
  }
  if (!vocab.empty() && !more.empty()) vocab += ',';
  vocab += more;
  const bool vocab_first = vocab_.begin < merges_.begin;
  const Span first = vocab_first ? vocab_ : merges_, second = vocab_first ? merges_ : vocab_;
  std::string out(document_.substr(0, first.begin));
  out += vocab_first ? vocab : merges;
  out += at({first.end, second.begin});
  out += vocab_first ? merges : vocab;
  out += document_.substr(second.end);
  return out;
}

std::optional<std::string> Vocabulary::token(int64_t id) const {
  if (id < 0 || id >= static_cast<int64_t>(by_id_.size()) || by_id_[id] < 0) return std::nullopt;
  std::string buffer;
  return std::string(text(tokens_[by_id_[id]], buffer));
}

std::optional<int64_t> Vocabulary::id(std::string_view token) const {
  const int32_t index = places_[place_of(token)];
  return index < 0 ? std::nullopt : std::optional<int64_t>(tokens_[index].id);
}

}  // namespace w4conv
