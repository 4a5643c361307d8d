// What the CPU and its operating system offer, and the choice of a tier.
#pragma once
#include <string>
#include <vector>

#include "w4conv/kernels.h"

namespace w4conv {

// Tiers that this build holds and this CPU can run, lowest first.
std::vector<const Kernels*> available_kernels();
// The table in use: the highest available, or the one named by W4CONV_ISA. Throws std::invalid_argument when that names no
// available tier. Chosen at each call, so a test may change the variable.
const Kernels& kernels();

}  // namespace w4conv
