# How a library of the project is made, and the search for the CUDA toolkit.
#
# tenure_add_library makes the shared library NAME and, of the same objects, the static archive
# NAME-internal whose private symbols the tests can see.

function(tenure_add_library name)
  cmake_parse_arguments(arg "" "MAP" "SOURCES;HEADERS;LINK" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${arg_SOURCES})
  if(NOT sources)
    return()
  endif()
  add_library(${name}-objects OBJECT ${sources})
  add_library(${name} SHARED $<TARGET_OBJECTS:${name}-objects>)
  add_library(${name}-internal STATIC $<TARGET_OBJECTS:${name}-objects>)
  set(map ${CMAKE_SOURCE_DIR}/${arg_MAP})
  target_link_options(${name} PRIVATE -Wl,-Bsymbolic-functions)
  if(NOT TENURE_SANITIZE)
    target_link_options(${name} PRIVATE -Wl,-z,defs)
  endif()
  if(EXISTS ${map})
    target_link_options(${name} PRIVATE -Wl,--version-script=${map})
    set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS ${map})
  endif()
  foreach(item ${arg_LINK})
    if(TARGET ${item}-internal)
      # A library of ours: its header is part of this one's, so who links this one links both.
      target_link_libraries(${name} PUBLIC ${item})
      target_link_libraries(${name}-internal PUBLIC ${item}-internal)
    else()
      target_link_libraries(${name} PRIVATE ${item})
      target_link_libraries(${name}-internal PUBLIC ${item})
    endif()
  endforeach()
  set_target_properties(${name} PROPERTIES VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR} PUBLIC_HEADERS "${arg_HEADERS}" EXPORT_NAME ${name}
    INSTALL_RPATH "$ORIGIN")
  target_include_directories(${name} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_property(GLOBAL APPEND PROPERTY TENURE_LIBRARIES ${name})
endfunction()

# Sets TENURE_CUDA_ENABLED, TENURE_NVCC and TENURE_CUDA_INCLUDE_DIRS in the caller.
function(tenure_find_cuda)
  set(enabled OFF)
  if(NOT TENURE_CUDA STREQUAL "OFF")
    find_program(TENURE_NVCC nvcc PATHS /usr/local/cuda/bin)
    if(TENURE_NVCC)
      get_filename_component(bin ${TENURE_NVCC} DIRECTORY)
      find_path(TENURE_CUDA_INCLUDE_DIRS cublasLt.h
        PATHS ${bin}/../include /usr/local/cuda/include)
    endif()
    if(TENURE_NVCC AND TENURE_CUDA_INCLUDE_DIRS)
      set(enabled ON)
    elseif(TENURE_CUDA STREQUAL "ON")
      message(FATAL_ERROR "TENURE_CUDA=ON needs nvcc and cublasLt.h: install the CUDA toolkit, "
        "or use TENURE_CUDA=OFF")
    endif()
  endif()
  message(STATUS "CUDA kernels: ${enabled}")
  set(TENURE_CUDA_ENABLED ${enabled} PARENT_SCOPE)
endfunction()

# Builds ops/*.cu into the library; without a toolkit the CUDA table says so when called.
function(tenure_use_cuda_kernels name)
  include(cuda_kernels)
  tenure_add_cuda_kernels(${name})
endfunction()

# NVTX is headers alone: with them, libtenure can tell tools of the blocks in its pools.
function(tenure_use_nvtx)
  find_path(TENURE_NVTX_INCLUDE nvtx3/nvToolsExtMem.h HINTS ${TENURE_CUDA_INCLUDE_DIRS}
    PATHS /usr/local/cuda/include)
  if(TENURE_NVTX_INCLUDE)
    set_source_files_properties(alloc/nvtx_memory.c PROPERTIES
      COMPILE_DEFINITIONS TENURE_WITH_NVTX
      COMPILE_OPTIONS "-isystem;${TENURE_NVTX_INCLUDE}")
    message(STATUS "NVTX memory annotations: ON")
  else()
    message(STATUS "NVTX memory annotations: OFF (no nvtx3/nvToolsExtMem.h)")
  endif()
endfunction()
