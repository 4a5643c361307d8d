#include <cstdlib>
#include <stdexcept>

#if defined(W4CONV_TIER_AVX2)
#include <cpuid.h>
#endif

#include "w4conv/cpu.h"

namespace w4conv {
namespace {

#if defined(W4CONV_TIER_AVX2)
// Bit 4 of EAX of leaf 7, subleaf 1, which not every compiler's __builtin_cpu_supports knows. The registers are AVX2's.
bool has_avxvnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 0x10u) != 0;
}
#endif

// __builtin_cpu_supports asks CPUID and, through XGETBV, whether the operating system saves the registers.
bool runs_here(const Kernels& k) {
#if defined(W4CONV_TIER_AVX2)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (&k == &kAvx2Kernels) return avx2;
  const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (&k == &kAvxVnniKernels) return W4CONV_AVXVNNI_AS_AVX512 ? avx512vnni : avx2 && has_avxvnni();
  if (&k == &kAvx512Kernels) return avx512;
  if (&k == &kAvx512VnniKernels) return avx512vnni;
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
