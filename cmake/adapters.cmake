# The adapters of other frameworks: libtenure-adapters.so in C, libtenure-torch.so with torch's
# exceptions in C++, and the Python package that puts them in place.

enable_language(CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)

tenure_add_library(tenure-adapters SOURCES adapters/*.c MAP adapters/tenure_adapters.map
  HEADERS adapters/tenure_adapters.h LINK tenure Threads::Threads)
tenure_add_library(tenure-torch SOURCES adapters/torch/*.cpp MAP adapters/torch/tenure_torch.map
  HEADERS adapters/torch/tenure_torch.h LINK tenure-adapters ${CMAKE_DL_LIBS})
target_include_directories(tenure-adapters-objects PRIVATE adapters)
target_include_directories(tenure-torch-objects PRIVATE adapters adapters/torch)
install(DIRECTORY python/tenure DESTINATION ${CMAKE_INSTALL_LIBDIR}/tenure/python
  FILES_MATCHING PATTERN "*.py")
