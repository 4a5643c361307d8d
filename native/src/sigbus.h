// Pages of a mapping that are gone: the file was shortened under it, or its disk cannot be read.
#pragma once

namespace w4conv {

// From now on touching such a page ends the process with a message on stderr and exit code 3, as for any input that is
// damaged, instead of a bare SIGBUS. For programs to call, not for libraries: there is one handler in a process.
void explain_sigbus();

}  // namespace w4conv
