# The emulated device (tests/emulation): the CUDA kernels, compiled for the CPU, and a driver that
# runs them. Needs no CUDA toolkit.
#
# ops/cuda_*.c are compiled once more, so that a library that was built without kernels can be
# tested against them too; where cublasLt.h is found with a cuBLASLt that does as a test says.
# Their symbols are found before those of the archive, of which the linker then takes none of these
# files.

enable_language(CXX)
file(GLOB kernel_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/cuda_*.cu)
file(GLOB argument_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/cuda_*arguments.h)
list(APPEND kernel_sources ${CMAKE_SOURCE_DIR}/tests/emulation/planted_kernels.cu)
list(APPEND argument_headers ${CMAKE_SOURCE_DIR}/tests/emulation/planted_arguments.h)
file(GLOB launch_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/cuda_*.c)
list(FILTER launch_sources EXCLUDE REGEX "/cuda_(absent|blas)\\.c$")
if(TENURE_CUDA_INCLUDE_DIRS)
  list(APPEND launch_sources tests/emulation/scripted_cublaslt.c)
else()
  list(FILTER launch_sources EXCLUDE REGEX "/cuda_(blas|gemm)[a-z_]*\\.c$")
  list(APPEND launch_sources tests/emulation/emulated_without_gemm.c)
endif()

add_library(tenure_emulation OBJECT tests/emulation/emulator.c
  tests/emulation/emulator_fiber.c tests/emulation/emulated_driver.c ${launch_sources})
target_include_directories(tenure_emulation PUBLIC tests/emulation)
target_link_libraries(tenure_emulation PUBLIC tenure_test_support)
if(TENURE_CUDA_INCLUDE_DIRS)
  target_include_directories(tenure_emulation SYSTEM PRIVATE ${TENURE_CUDA_INCLUDE_DIRS})
endif()
# Fibers are not threads: what runs them is for TSan to watch, not to instrument.
if(TENURE_SANITIZE MATCHES "thread")
  set_source_files_properties(tests/emulation/emulator.c tests/emulation/emulator_fiber.c
    PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread COMPILE_DEFINITIONS EMULATED_WITH_TSAN)
elseif(TENURE_SANITIZE MATCHES "address")
  set_source_files_properties(tests/emulation/emulator_fiber.c
    PROPERTIES COMPILE_DEFINITIONS EMULATED_WITH_ASAN)
endif()

# Each .cu in a namespace of its own, since each is a module of its own on a device. nvcc has
# compiled it with warnings as errors: g++, to which half of it is foreign, is not asked for any.
set(includes "#include \"emulated_cuda.h\"\n")
foreach(header ${argument_headers})
  string(APPEND includes "#include \"${header}\"\n")
endforeach()
set(images "")
set(objects "")
foreach(source ${kernel_sources})
  get_filename_component(name ${source} NAME_WE)
  set(wrapper ${CMAKE_BINARY_DIR}/emulation/${name}_emulated.cpp)
  file(CONFIGURE OUTPUT ${wrapper} @ONLY CONTENT
    "@includes@namespace @name@ {\n#include \"@source@\"\n}\n")
  add_library(emulated_${name} OBJECT ${wrapper})
  target_include_directories(emulated_${name} BEFORE PRIVATE tests/emulation/cuda
    tests/emulation ops)
  target_compile_options(emulated_${name} PRIVATE -O1 -w)
  list(APPEND images "${name}=$<TARGET_OBJECTS:emulated_${name}>")
  list(APPEND objects $<TARGET_OBJECTS:emulated_${name}>)
endforeach()
set(table ${CMAKE_BINARY_DIR}/emulation/kernel_table.cpp)
add_custom_command(OUTPUT ${table}
  COMMAND python3 ${CMAKE_SOURCE_DIR}/tests/emulation/list_kernels.py ${CMAKE_OBJDUMP} ${table}
    "${argument_headers}" ${images}
  DEPENDS tests/emulation/list_kernels.py ${objects} COMMENT "Listing emulated kernels" VERBATIM)
add_library(emulated_table OBJECT ${table})
target_include_directories(emulated_table PRIVATE tests/emulation ops)
target_compile_options(emulated_table PRIVATE -w)

# Links a test with all of it.
function(tenure_use_emulation target)
  target_link_libraries(${target} PRIVATE tenure_emulation)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:tenure_emulation>
    $<TARGET_OBJECTS:emulated_table>)
  foreach(source ${kernel_sources})
    get_filename_component(name ${source} NAME_WE)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:emulated_${name}>)
  endforeach()
  target_link_options(${target} PRIVATE LINKER:--defsym=tn__driver_cuda=tn__driver_emulated)
endfunction()
