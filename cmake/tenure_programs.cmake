# The programs: tenure (bench/cli), tenure-demo (bench/demo), tenure-train (bench/trainer), those
# that measure, and what they share.

find_library(TENURE_CJSON cjson)
find_path(TENURE_CJSON_INCLUDE cjson/cJSON.h)
if(NOT TENURE_CJSON OR NOT TENURE_CJSON_INCLUDE)
  message(FATAL_ERROR "cJSON is missing: install libcjson-dev (./run does it)")
endif()

file(GLOB support_sources CONFIGURE_DEPENDS bench/cli/*.c)
list(FILTER support_sources EXCLUDE REGEX "_main\\.c$")
if(support_sources)
  add_library(tenure_bench_support STATIC ${support_sources})
  target_include_directories(tenure_bench_support PUBLIC bench/cli alloc/simcuda
    ${TENURE_CJSON_INCLUDE})
  target_link_libraries(tenure_bench_support PUBLIC tenure ZLIB::ZLIB ${TENURE_CJSON}
    ${CMAKE_DL_LIBS} m)
  set(report_folder ${CMAKE_SOURCE_DIR}/bench/cli)
  set_source_files_properties(bench/cli/report_assets.c PROPERTIES
    COMPILE_DEFINITIONS TENURE_REPORT_FOLDER="${report_folder}"
    OBJECT_DEPENDS "${report_folder}/report_style.css;${report_folder}/report_script.js")
endif()

# All that a program needs to run, libraries that it loads by itself included, and no test.
add_custom_target(tenure-programs)
get_property(libraries GLOBAL PROPERTY TENURE_LIBRARIES)
add_dependencies(tenure-programs ${libraries})
if(TARGET tenure-mpi)
  add_dependencies(tenure-programs tenure-mpi)
endif()

function(tenure_add_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${arg_SOURCES})
  if(NOT sources)
    return()
  endif()
  add_executable(${name}-program ${sources})
  # Installed programs find the libraries beside them, wherever the tree has been put.
  file(RELATIVE_PATH to_libraries ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(${name}-program PROPERTIES OUTPUT_NAME ${name}
    INSTALL_RPATH "$ORIGIN/${to_libraries}")
  target_link_libraries(${name}-program PRIVATE ${arg_LINK})
  add_dependencies(tenure-programs ${name}-program)
endfunction()

# `tenure simulate` alone: it needs the ops and the communicators.
if(TARGET tenure_bench_support)
  file(GLOB simulate_sources CONFIGURE_DEPENDS bench/simulate/*.c)
  add_library(tenure_simulate STATIC ${simulate_sources})
  target_include_directories(tenure_simulate PUBLIC bench/simulate)
  target_link_libraries(tenure_simulate PUBLIC tenure_bench_support tenure-dist tenure-ops)
  install(DIRECTORY bench/models/ DESTINATION ${CMAKE_INSTALL_DATADIR}/tenure/models
    FILES_MATCHING PATTERN "*.json")
endif()

if(TARGET tenure_bench_support)
  tenure_add_program(tenure SOURCES bench/cli/cli_main.c LINK tenure_simulate)
  add_dependencies(tenure-program tenure-preload)
  if(TARGET tenure-ops)
    tenure_add_program(tenure-demo SOURCES bench/demo/*.c LINK tenure_bench_support tenure-ops)
    tenure_add_program(tenure-train SOURCES bench/trainer/*.c LINK tenure_bench_support tenure-ops)
    tenure_add_program(tenure-bench-gpu SOURCES bench/gpu/*.c
      LINK tenure_bench_support tenure-ops)
    tenure_add_program(tenure-bench-layer SOURCES bench/layer/*.c bench/gpu/gpu_bench_measure.c
      LINK tenure_bench_support tenure-ops)
    target_include_directories(tenure-bench-layer-program PRIVATE bench/gpu)
    if(TARGET tenure-dist)
      tenure_add_program(tenure-bench-dist SOURCES bench/dist/*.c
        LINK tenure_bench_support tenure-dist tenure-ops)
      tenure_add_program(tenure-bench-sharded SOURCES bench/sharded/*.c
        LINK tenure_bench_support tenure-dist tenure-ops)
    endif()
    tenure_add_program(tenure-bench-tensor SOURCES bench/tensor/*.c
      LINK tenure_bench_support tenure-ops Threads::Threads)
  endif()
endif()
tenure_add_program(tenure-bench-peers SOURCES bench/peers/peer_bench_*.c
  LINK tenure Threads::Threads ${CMAKE_DL_LIBS})
tenure_add_program(tenure-soak SOURCES bench/soak/*.c LINK tenure Threads::Threads)
if(TENURE_CUDA_ENABLED)
  tenure_add_cuda_program(tenure-cuda-program ${CMAKE_SOURCE_DIR}/bench/preload/cuda_program.cu)
  tenure_embed_kernels(tenure-soak-program ${CMAKE_SOURCE_DIR}/bench/soak/soak_kernels.cu)
endif()
