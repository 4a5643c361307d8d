// A block of memory aligned to 64 bytes that only grows. Large blocks cost resident memory only where they are touched.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace w4conv {

class Buffer {
 public:
  // At least `nbytes`; what it held is lost when it grows. Zeroed if asked for.
  void* reserve(size_t nbytes, bool zeroed = false) {
    if (nbytes > nbytes_) allocate(nbytes, 64);
    if (zeroed) std::memset(data_.get(), 0, nbytes);
    return data_.get();
  }
  // The same, once, for what fills slowly from its begin on and is read as a whole: behind the first kHugePage bytes in huge
  // pages, where the system has them, so that what is small stays small and the rest takes at most twice what it needs.
  void* reserve_filling(size_t nbytes) {
    allocate(nbytes, nbytes > kHugePage ? kHugePage : 64);
#if defined(MADV_HUGEPAGE)
    if (nbytes > kHugePage) (void)madvise(data_.get() + kHugePage, nbytes_ - kHugePage, MADV_HUGEPAGE);
#endif
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
  static constexpr size_t kHugePage = size_t{2} << 20;
  void allocate(size_t nbytes, size_t alignment) {
    data_.reset();
    nbytes_ = 0;
    const size_t padded = (nbytes + alignment - 1) / alignment * alignment;
    data_.reset(static_cast<char*>(std::aligned_alloc(alignment, padded)));
    if (data_ == nullptr) throw std::bad_alloc();
    nbytes_ = padded;
  }
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  size_t nbytes_ = 0;
};

}  // namespace w4conv
