#include <stdexcept>
#include <string>

#include "w4conv/kernels.h"

namespace w4conv {

void unknown(const char* what) { throw std::logic_error(std::string("no kernel for this ") + what); }

}  // namespace w4conv
