#include <cstdlib>
#include <iterator>
#include <stdexcept>

#if defined(W4CONV_X86)
#include <cpuid.h>
#endif

#include "w4conv/cpu.h"

namespace w4conv {

// From src/kernels/<tier>.cpp.
namespace scalar {
extern const Kernels kKernels;
}
#if defined(W4CONV_X86)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avxvnni {
extern const DotKernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512vnni {
extern const DotKernels kKernels;
}
#endif

namespace {

#if defined(W4CONV_X86)
// What the processor has, and the registers that the operating system saves. Read here, since __builtin_cpu_supports
// answers no where the compiler's runtime library leaves it out.
struct Cpu {
  bool avx2 = false, avxvnni = false, avx512 = false, avx512vnni = false;

  Cpu() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const auto bit = [](unsigned word, int i) { return (word >> i & 1) != 0; };
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return;
    const bool fma = bit(ecx, 12), xgetbv = bit(ecx, 27), avx = bit(ecx, 28), f16c = bit(ecx, 29);
    if (!xgetbv || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return;
    const unsigned saved = saved_registers();
    const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xE6) == 0xE6;
    avx2 = ymm && avx && fma && f16c && bit(ebx, 5);
    avx512 = avx2 && zmm && bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31);  // F, DQ, BW, VL
    avx512vnni = avx512 && bit(ecx, 11);
    avxvnni = avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && bit(eax, 4);
  }

  static unsigned saved_registers() {
    unsigned eax = 0, edx = 0;
    asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
  }
};
#endif

// A tier that is compiled as its dot product alone takes all else from a lower one.
[[maybe_unused]] Kernels with_dot(const char* name, Kernels kernels, const DotKernels& dot) {
  static_cast<DotKernels&>(kernels) = dot;
  kernels.name = name;
  return kernels;
}

struct Tier {
  Kernels kernels;
  bool runs_here;
};

// The list of tiers, lowest first: the kernels, and what they need of the CPU. Built at the first call, when the tables of
// all tiers are there.
const auto& tiers() {
#if defined(W4CONV_X86)
  static const Cpu cpu;
#endif
  static const Tier all[] = {
      {scalar::kKernels, true},
#if defined(W4CONV_X86)
      {avx2::kKernels, cpu.avx2},
      {with_dot("avxvnni", avx2::kKernels, avxvnni::kKernels), W4CONV_AVXVNNI_AS_AVX512 ? cpu.avx512vnni : cpu.avxvnni},
      {avx512::kKernels, cpu.avx512},
      {with_dot("avx512vnni", avx512::kKernels, avx512vnni::kKernels), cpu.avx512vnni},
#endif
  };
  static_assert(std::size(all) == W4CONV_N_TIERS, "cmake/isa.cmake builds other tiers than this list names");
  return all;
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> out;
  for (const Tier& tier : tiers()) {
    if (tier.runs_here) out.push_back(&tier.kernels);
  }
  return out;
}

const Kernels& kernels() {
  const std::vector<const Kernels*> available = available_kernels();
  const char* forced = std::getenv("W4CONV_ISA");
  if (forced == nullptr || *forced == '\0') return *available.back();
  std::string names;
  for (const Kernels* k : available) {
    if (std::string(k->name) == forced) return *k;
    names += (names.empty() ? "" : ", ") + std::string(k->name);
  }
  throw std::invalid_argument("W4CONV_ISA=" + std::string(forced) + ": this CPU and build offer only " + names);
}

}  // namespace w4conv
