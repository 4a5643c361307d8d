#include <cstdlib>
#include <stdexcept>

#if defined(W4CONV_TIER_AVX2)
#include <cpuid.h>
#endif

#include "w4conv/cpu.h"

namespace w4conv {
namespace {

#if defined(W4CONV_TIER_AVX2)
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

bool runs_here(const Kernels& k) {
#if defined(W4CONV_TIER_AVX2)
  static const Cpu cpu;
  if (&k == &kAvx2Kernels) return cpu.avx2;
  if (&k == &kAvxVnniKernels) return W4CONV_AVXVNNI_AS_AVX512 ? cpu.avx512vnni : cpu.avxvnni;
  if (&k == &kAvx512Kernels) return cpu.avx512;
  if (&k == &kAvx512VnniKernels) return cpu.avx512vnni;
#endif
  return &k == &kScalarKernels;
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  const Kernels* const built[] = {
      &kScalarKernels,
#if defined(W4CONV_TIER_AVX2)
      &kAvx2Kernels,   &kAvxVnniKernels, &kAvx512Kernels, &kAvx512VnniKernels,
#endif
  };
  std::vector<const Kernels*> out;
  for (const Kernels* k : built) {
    if (runs_here(*k)) out.push_back(k);
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
