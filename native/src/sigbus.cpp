#include "sigbus.h"

#include <csignal>
#include <unistd.h>

namespace w4conv {
namespace {

struct sigaction before;

// Only calls that are allowed in a signal handler.
void on_bus_error(int, siginfo_t* info, void*) {
  if (info->si_code != BUS_ADRERR) {
    sigaction(SIGBUS, &before, nullptr);  // not ours: the instruction faults again and meets who was here before
    return;
  }
  static constexpr char kMessage[] =
      "w4conv: error: a file was shortened while it was in use, or its disk cannot be read. "
      "Run again when nothing writes to it; if that fails, fetch or convert it again\n";
  if (write(STDERR_FILENO, kMessage, sizeof kMessage - 1) < 0) _exit(3);
  _exit(3);
}

}  // namespace

void explain_sigbus() {
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &before);
}

}  // namespace w4conv
