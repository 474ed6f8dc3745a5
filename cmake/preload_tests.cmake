# The programs and libraries of the drop-in's tests: tests/preload/test_*.sh run the ones under
# `tenure run` and LD_PRELOAD on the others. None links libtenure.

set(lookalike_dir ${CMAKE_BINARY_DIR}/tests/lookalike)
set(preload_dir ${CMAKE_SOURCE_DIR}/tests/preload)

# libcuda.so.1, the simulated driver with more calls; libcudart.so.13 on it.
add_library(lookalike_cuda SHARED ${preload_dir}/lookalike_cuda.c)
target_compile_definitions(lookalike_cuda PRIVATE
  TENURE_SIM_LIBRARY="${CMAKE_BINARY_DIR}/libtenure-simcuda.so")
target_include_directories(lookalike_cuda PRIVATE alloc/simcuda)
target_link_libraries(lookalike_cuda PRIVATE tenure-simcuda ${CMAKE_DL_LIBS})
target_link_options(lookalike_cuda PRIVATE -Wl,-Bsymbolic-functions -Wl,--no-as-needed)
set_target_properties(lookalike_cuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1
  C_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${lookalike_dir})

add_library(lookalike_cudart SHARED ${preload_dir}/lookalike_cudart.c)
target_include_directories(lookalike_cudart PRIVATE alloc/simcuda)
target_link_libraries(lookalike_cudart PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(lookalike_cudart PROPERTIES OUTPUT_NAME cudart SOVERSION 13
  C_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${lookalike_dir})

function(tenure_add_preload_program name)
  add_executable(${name} ${ARGN})
  target_include_directories(${name} PRIVATE alloc/simcuda ${preload_dir})
  target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endfunction()

tenure_add_preload_program(preload_dynamic_program ${preload_dir}/runtime_program.c)
target_link_libraries(preload_dynamic_program PRIVATE lookalike_cudart)
tenure_add_preload_program(preload_static_program ${preload_dir}/runtime_program.c
  ${preload_dir}/lookalike_cudart.c)
tenure_add_preload_program(preload_lookup_program ${preload_dir}/lookup_program.c)
tenure_add_preload_program(preload_edge_program ${preload_dir}/edge_program.c)
tenure_add_preload_program(preload_linked_program ${preload_dir}/linked_program.c)
target_link_libraries(preload_linked_program PRIVATE lookalike_cuda tenure-simcuda)
foreach(name other_preload other_library)
  add_library(preload_${name} MODULE ${preload_dir}/${name}.c)
  target_compile_options(preload_${name} PRIVATE -fno-sanitize=all)
  target_link_options(preload_${name} PRIVATE -fno-sanitize=all)
  target_link_libraries(preload_${name} PRIVATE ${CMAKE_DL_LIBS})
  set_target_properties(preload_${name} PROPERTIES C_VISIBILITY_PRESET default
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endforeach()
