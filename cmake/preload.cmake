# The drop-in: libtenure-preload.so, which LD_PRELOAD brings into every process of a job, and
# libtenure-dropin.so, which that loads at a process's first CUDA memory call. `tenure run` finds
# the first beside libtenure.so.

add_library(tenure-dropin MODULE alloc/preload/dropin_blocks.c alloc/preload/dropin_fence.c
  alloc/preload/dropin_memory.c alloc/preload/dropin_open.c alloc/preload/dropin_peers.c
  alloc/preload/dropin_pointer.c alloc/preload/dropin_record.c alloc/preload/dropin_stream.c
  alloc/preload/dropin_whole.c)
target_link_libraries(tenure-dropin PRIVATE tenure Threads::Threads)
target_link_options(tenure-dropin PRIVATE
  -Wl,--version-script=${CMAKE_SOURCE_DIR}/alloc/preload/dropin.map)
set_target_properties(tenure-dropin PROPERTIES INSTALL_RPATH "$ORIGIN"
  LINK_DEPENDS ${CMAKE_SOURCE_DIR}/alloc/preload/dropin.map)

# In programs of others: no sanitizer, no coverage. Optimized, so that dlsym passes on by a jump.
add_library(tenure-preload MODULE alloc/preload/preload_calls.c alloc/preload/preload_lookup.c)
target_compile_options(tenure-preload PRIVATE -O2 -foptimize-sibling-calls -fno-sanitize=all
  -fno-profile-arcs -fno-test-coverage)
set_target_properties(tenure-preload PROPERTIES
  LINK_DEPENDS ${CMAKE_SOURCE_DIR}/alloc/preload/preload.map)
target_link_options(tenure-preload PRIVATE -fno-sanitize=all -fno-profile-arcs
  -Wl,--version-script=${CMAKE_SOURCE_DIR}/alloc/preload/preload.map)
target_link_libraries(tenure-preload PRIVATE ${CMAKE_DL_LIBS})
add_dependencies(tenure-preload tenure-dropin)

install(TARGETS tenure-preload tenure-dropin LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})

# bench/preload/cuda_program.cu as anyone would build it: nvcc, and its static runtime.
function(tenure_add_cuda_program name source)
  set(program ${CMAKE_BINARY_DIR}/${name})
  add_custom_command(OUTPUT ${program}
    COMMAND ${TENURE_NVCC} -O2 -std=c++17 -gencode arch=compute_90a,code=sm_90a
      -gencode arch=compute_80,code=compute_80 -Werror all-warnings -o ${program} ${source}
    DEPENDS ${source} COMMENT "Compiling ${name}" VERBATIM)
  add_custom_target(${name}-program ALL DEPENDS ${program})
  add_dependencies(tenure-programs ${name}-program)
endfunction()
