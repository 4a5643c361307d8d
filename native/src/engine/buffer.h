// A block of memory aligned to 64 bytes that only grows. Large blocks cost resident memory only where they are touched.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace w4conv {

class Buffer {
 public:
  // At least `nbytes`; what it held is lost when it grows. Zeroed if asked for.
  void* reserve(size_t nbytes, bool zeroed = false) {
    if (nbytes > nbytes_) {
      data_.reset();
      const size_t padded = (nbytes + 63) / 64 * 64;
      data_.reset(static_cast<char*>(std::aligned_alloc(64, padded)));
      if (data_ == nullptr) throw std::bad_alloc();
      nbytes_ = padded;
    }
    if (zeroed) std::memset(data_.get(), 0, nbytes);
    return data_.get();
  }
  template <class T>
  T* reserve_for(int64_t n) {
    return static_cast<T*>(reserve(static_cast<size_t>(n) * sizeof(T)));
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  size_t nbytes() const { return nbytes_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  size_t nbytes_ = 0;
};

}  // namespace w4conv
