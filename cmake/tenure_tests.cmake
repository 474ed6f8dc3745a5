# Tests: every tests/<kind>/test_*.c is one cmocka program, ctest name <kind>/<name>.
#
#   unit, sim, fault, fuzz   linked with the static archives: they see private symbols
#   emulation                likewise, and with a device that runs the CUDA kernels on the CPU
#   adapters                 likewise, and with the adapters; also tests in C++
#   api, gpu, misuse         linked with the shared libraries: public headers only
#   process                  linked with no library of ours: they load them
#   cli                      likewise, and with what the programs under bench share
#   tests/<kind>/*.sh        shell tests, called with the build and the source directory
# Exit status 77 is a skip; tests/checks/listed_skips.txt lists those that are allowed.

find_library(TENURE_CMOCKA cmocka)
find_path(TENURE_CMOCKA_INCLUDE cmocka.h)
if(NOT TENURE_CMOCKA OR NOT TENURE_CMOCKA_INCLUDE)
  message(FATAL_ERROR "cmocka is missing: install libcmocka-dev (./run does it)")
endif()
file(GLOB support CONFIGURE_DEPENDS tests/support/*.c)
add_library(tenure_test_support STATIC ${support})
target_include_directories(tenure_test_support PUBLIC tests/support alloc/simcuda)
target_include_directories(tenure_test_support SYSTEM PUBLIC ${TENURE_CMOCKA_INCLUDE})
target_compile_definitions(tenure_test_support PUBLIC
  TENURE_SIM_LIBRARY="${CMAKE_BINARY_DIR}/libtenure-simcuda.so")

# tests/<kind>/*_support.c is compiled once and linked to every test of the kind.
function(tenure_add_kind_support kind)
  file(GLOB sources CONFIGURE_DEPENDS tests/${kind}/*_support.c)
  if(sources)
    add_library(tenure_${kind}_support OBJECT ${sources})
    target_include_directories(tenure_${kind}_support PRIVATE adapters)
    target_link_libraries(tenure_${kind}_support PRIVATE tenure_test_support)
  endif()
endfunction()

function(tenure_add_test kind source linkage)
  get_filename_component(name ${source} NAME_WE)
  string(REGEX REPLACE "^test_" "" short ${name})
  set(target ${kind}_${name})
  add_executable(${target} ${source})
  if(TARGET tenure_${kind}_support)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:tenure_${kind}_support>)
  endif()
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE tests/${kind})
  target_link_libraries(${target} PRIVATE tenure_test_support)
  if(TARGET tenure_bench_support AND kind MATCHES "^(fuzz|cli)$")
    target_include_directories(${target} PRIVATE bench/cli ${TENURE_CJSON_INCLUDE})
    target_link_libraries(${target} PRIVATE $<TARGET_FILE:tenure_bench_support>
      ${TENURE_CJSON})
    add_dependencies(${target} tenure_bench_support)
    if(TARGET tenure_simulate)
      target_include_directories(${target} PRIVATE bench/simulate)
      target_link_libraries(${target} PRIVATE $<TARGET_FILE:tenure_simulate>
        $<TARGET_FILE:tenure_bench_support>)
      add_dependencies(${target} tenure_simulate)
    endif()
  endif()
  if(TENURE_CUDA_INCLUDE_DIRS AND short MATCHES "abi|gpu")
    target_include_directories(${target} SYSTEM PRIVATE ${TENURE_CUDA_INCLUDE_DIRS})
  endif()
  if(kind STREQUAL "adapters")
    target_include_directories(${target} PRIVATE adapters adapters/torch)
    target_link_libraries(${target} PRIVATE tenure-torch-internal)
  endif()
  foreach(library tenure-dist tenure-ops tenure)
    if(TARGET ${library}${linkage})
      target_link_libraries(${target} PRIVATE ${library}${linkage})
    endif()
  endforeach()
  target_link_libraries(${target} PRIVATE ${TENURE_CMOCKA} ZLIB::ZLIB ${CMAKE_DL_LIBS} m)
  target_compile_definitions(${target} PRIVATE TENURE_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
    TENURE_BUILD_DIR="${CMAKE_BINARY_DIR}" TENURE_WITH_NCCL=$<BOOL:${TENURE_NCCL_ENABLED}>)
  if(TARGET tenure-simcuda)
    add_dependencies(${target} tenure-simcuda)
  endif()
  add_test(NAME ${kind}/${short} COMMAND ${target})
  tenure_set_test_properties(${kind}/${short})
endfunction()

# Allocations that are too large fail under a sanitizer as they do without: tests expect it.
set(TENURE_SANITIZER_ENVIRONMENT UBSAN_OPTIONS=print_stacktrace=1
  ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1)

# For what waits for ever: many times what the longest takes, with a sanitizer on a busy machine.
set(TENURE_TEST_TIMEOUT_S 1800)

function(tenure_set_test_properties test)
  get_filename_component(kind ${test} DIRECTORY)
  set_tests_properties(${test} PROPERTIES SKIP_RETURN_CODE 77
    TIMEOUT ${TENURE_TEST_TIMEOUT_S} LABELS ${kind}
    ENVIRONMENT "TENURE_SIM_STRICT_UNLOAD=1;${TENURE_SANITIZER_ENVIRONMENT}")
endfunction()

foreach(kind unit sim fault fuzz adapters)
  tenure_add_kind_support(${kind})
  file(GLOB sources CONFIGURE_DEPENDS tests/${kind}/test_*.c tests/${kind}/test_*.cpp)
  foreach(source ${sources})
    tenure_add_test(${kind} ${source} -internal)
  endforeach()
endforeach()
include(emulation)
tenure_add_kind_support(emulation)
file(GLOB sources CONFIGURE_DEPENDS tests/gpu/gpu_support.c tests/gpu/op_battery*_support.c)
target_sources(tenure_emulation_support PRIVATE ${sources})
target_include_directories(tenure_emulation_support PUBLIC tests/gpu tests/emulation)
file(GLOB sources CONFIGURE_DEPENDS tests/emulation/test_*.c)
if(NOT TENURE_CUDA_INCLUDE_DIRS)
  list(FILTER sources EXCLUDE REGEX "/test_emulated_gemm")
endif()
foreach(source ${sources})
  tenure_add_test(emulation ${source} -internal)
  get_filename_component(name ${source} NAME_WE)
  tenure_use_emulation(emulation_${name})
  target_include_directories(emulation_${name} PRIVATE tests/gpu)
endforeach()
# It takes longest by far: begun first, it is not what is waited for last.
set_tests_properties(emulation/emulated_battery PROPERTIES COST 100)
foreach(kind api cli gpu misuse)
  tenure_add_kind_support(${kind})
  file(GLOB sources CONFIGURE_DEPENDS tests/${kind}/test_*.c)
  foreach(source ${sources})
    tenure_add_test(${kind} ${source} "")
  endforeach()
endforeach()
file(GLOB sources CONFIGURE_DEPENDS tests/process/test_*.c)
foreach(source ${sources})
  tenure_add_test(process ${source} -unlinked)
endforeach()

# What stands in for torch's libraries in adapters/torch_shim.
foreach(library c10 c10_cuda)
  add_library(tenure_test_${library} SHARED tests/adapters/c10/${library}_error.cpp)
  set_target_properties(tenure_test_${library} PROPERTIES OUTPUT_NAME ${library}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/c10)
  add_dependencies(adapters_test_torch_shim tenure_test_${library})
endforeach()
target_link_libraries(tenure_test_c10_cuda PRIVATE tenure_test_c10)

include(simulation)
include(preload_tests)
# The NVTX tool that tests/unit/test_nvtx_memory.c has injected.
if(TENURE_NVTX_INCLUDE)
  add_library(tenure_recording_tool MODULE tests/nvtx/recording_tool.c)
  target_include_directories(tenure_recording_tool SYSTEM PRIVATE ${TENURE_NVTX_INCLUDE})
  set_target_properties(tenure_recording_tool PROPERTIES C_VISIBILITY_PRESET default
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_dependencies(unit_test_nvtx_memory tenure_recording_tool)
endif()
target_include_directories(unit_test_nvtx_memory PRIVATE tests/nvtx)

file(GLOB scripts CONFIGURE_DEPENDS tests/*/test_*.sh)
foreach(script ${scripts})
  get_filename_component(name ${script} NAME_WE)
  get_filename_component(directory ${script} DIRECTORY)
  get_filename_component(kind ${directory} NAME)
  string(REGEX REPLACE "^test_" "" short ${name})
  add_test(NAME ${kind}/${short} COMMAND sh ${script} ${CMAKE_BINARY_DIR} ${CMAKE_SOURCE_DIR})
  tenure_set_test_properties(${kind}/${short})
endforeach()
