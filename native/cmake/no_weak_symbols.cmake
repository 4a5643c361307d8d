# Fails the build when an ISA object defines a weak symbol (an inline function of a standard header, say).
execute_process(COMMAND ${NM} -C --defined-only ${OBJECT} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
if(failed)
  message(WARNING "could not list the symbols of ${OBJECT}")
endif()
string(REGEX MATCH "[^\n]* [WVu] [^\n]*" weak "${symbols}")
if(weak)
  message(FATAL_ERROR "${OBJECT} defines a weak symbol: ${weak}")
endif()
