# Kernels: each ops/cuda_*.cu becomes a fat binary, and that becomes data of the ops library.
#
# There is no CUDA runtime and no CUDA language in CMake: nvcc makes machine code for sm_90a and
# PTX for every other GPU from sm_80 on, and an assembler directive puts the file into a section
# for constants under the name tn__<file>_image. Spills to local memory are errors.
# All presets have the same kernels, which takes minutes: compile_kernels.cmake does it once.
# Without a toolkit ops/cuda_absent.c stands in for all of it.

set(TENURE_NVCC_FLAGS -fatbin -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a
  -gencode arch=compute_80,code=compute_80 -prec-div=true -ftz=false -fmad=false
  -Xptxas --warn-on-spills -Xptxas --warning-as-error -Werror all-warnings
  CACHE INTERNAL "how kernels are compiled")

# Of ops/cuda_*.c only those that this build needs stay in the library.
function(tenure_select_cuda_sources objects)
  get_target_property(sources ${objects} SOURCES)
  if(TENURE_CUDA_ENABLED)
    list(FILTER sources EXCLUDE REGEX "/cuda_absent\\.c$")
  else()
    set(kept ${sources})
    list(FILTER kept INCLUDE REGEX "/cuda_absent\\.c$")
    list(FILTER sources EXCLUDE REGEX "/cuda_[a-z_]*\\.c$")
    list(APPEND sources ${kept})
  endif()
  set_property(TARGET ${objects} PROPERTY SOURCES ${sources})
endfunction()

function(tenure_embed_kernels objects source)
  get_filename_component(name ${source} NAME_WE)
  set(image ${CMAKE_BINARY_DIR}/kernels/${name}.fatbin)
  set(embedded ${CMAKE_BINARY_DIR}/kernels/${name}_image.c)
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/cuda_*.cuh
    ${CMAKE_SOURCE_DIR}/ops/cuda_*arguments.h ${CMAKE_SOURCE_DIR}/ops/exact_*.h)
  set(script ${CMAKE_SOURCE_DIR}/cmake/compile_kernels.cmake)
  add_custom_command(OUTPUT ${image}
    COMMAND ${CMAKE_COMMAND} "-DNVCC=${TENURE_NVCC}" "-DFLAGS=${TENURE_NVCC_FLAGS}"
      "-DSOURCE=${source}" "-DHEADERS=${headers}" "-DIMAGE=${image}"
      "-DCACHE=${CMAKE_SOURCE_DIR}/build/kernels" -P ${script}
    DEPENDS ${source} ${headers} ${script}
    COMMENT "Compiling kernels of ${name}.cu" VERBATIM)
  file(CONFIGURE OUTPUT ${embedded} @ONLY CONTENT [[
/* The kernels of @name@.cu as data. */
__asm__(".section .rodata\n"
        ".balign 64\n"
        ".global tn__@name@_image\n"
        ".hidden tn__@name@_image\n"
        "tn__@name@_image:\n"
        ".incbin \"@image@\"\n"
        ".previous\n");
]])
  set_source_files_properties(${embedded} PROPERTIES OBJECT_DEPENDS ${image})
  target_sources(${objects} PRIVATE ${embedded})
endfunction()

function(tenure_add_cuda_kernels name)
  tenure_select_cuda_sources(${name}-objects)
  if(NOT TENURE_CUDA_ENABLED)
    return()
  endif()
  target_include_directories(${name}-objects SYSTEM PRIVATE ${TENURE_CUDA_INCLUDE_DIRS})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/cuda_*.cu)
  foreach(source ${sources})
    tenure_embed_kernels(${name}-objects ${source})
  endforeach()
endfunction()
