// A block of memory aligned to 64 bytes that only grows. Large blocks cost resident memory only where they are touched.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace w4conv {

class Buffer {
 public:
  // At least `nbytes`; what it held is lost when it grows. Zeroed if asked for.
  void* reserve(size_t nbytes, bool zeroed = false) {
    if (nbytes > nbytes_) allocate(nbytes);
    if (zeroed) std::memset(data_.get(), 0, nbytes);
    return data_.get();
  }
  // The same for what fills slowly from its begin on and is read as a whole; what it held stays. Behind the first kHugePage
  // bytes in huge pages, where the system has them, so that what is small stays small and the rest takes at most twice what
  // it needs.
  void* grow_filling(size_t nbytes) {
    if (nbytes <= nbytes_) return data_.get();
    Buffer more;
    nbytes > kHugePage ? more.map(nbytes) : more.allocate(nbytes);
    if (nbytes_ > 0) std::memcpy(more.data_.get(), data_.get(), nbytes_);
    std::swap(*this, more);
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

  static constexpr size_t kHugePage = size_t{2} << 20;

 private:
  struct Free {
    void* mapped;  // the mapping that it is part of, or null
    size_t mapped_nbytes;
    Free() : Free(nullptr, 0) {}
    Free(void* base, size_t nbytes) : mapped(base), mapped_nbytes(nbytes) {}
    void operator()(char* p) const {
#if defined(MADV_HUGEPAGE)
      if (mapped != nullptr) return (void)munmap(mapped, mapped_nbytes);
#endif
      std::free(p);
    }
  };
  using Block = std::unique_ptr<char, Free>;

  void allocate(size_t nbytes) {
    data_.reset();
    nbytes_ = 0;
    const size_t padded = pad(nbytes, 64);
    data_ = Block(static_cast<char*>(std::aligned_alloc(64, padded)), Free());
    if (data_ == nullptr) throw std::bad_alloc();
    nbytes_ = padded;
  }
  // From the system, and back to it at once: blocks that grow would leave holes in the heap.
  void map(size_t nbytes) {
#if defined(MADV_HUGEPAGE)
    const size_t padded = pad(nbytes, kHugePage), whole = padded + kHugePage;
    void* const base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    data_ = Block(reinterpret_cast<char*>(pad(reinterpret_cast<uintptr_t>(base), kHugePage)), Free(base, whole));
    nbytes_ = padded;
    (void)madvise(data_.get() + kHugePage, nbytes_ - kHugePage, MADV_HUGEPAGE);
#else
    allocate(nbytes);
#endif
  }
  static constexpr size_t pad(size_t n, size_t to) { return (n + to - 1) / to * to; }
  Block data_;
  size_t nbytes_ = 0;
};

}  // namespace w4conv
