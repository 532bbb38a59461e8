# PENSTOCK_SANITIZE: everything that is compiled here runs under these sanitizers.
set(flags_address -fsanitize=address,undefined -fno-sanitize-recover=all)
set(flags_thread -fsanitize=thread)
if(PENSTOCK_SANITIZE)
  if(NOT DEFINED flags_${PENSTOCK_SANITIZE})
    message(FATAL_ERROR "PENSTOCK_SANITIZE is '${PENSTOCK_SANITIZE}': use address or thread")
  endif()
  # -g1: a report's lines and names; the rest would take a fifth of the time.
  add_compile_options(${flags_${PENSTOCK_SANITIZE}} -fno-omit-frame-pointer -O1 -g1)
  add_link_options(${flags_${PENSTOCK_SANITIZE}})
endif()
