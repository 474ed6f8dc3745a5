# libtenure-jemalloc.so: Debian's jemalloc for the host driver, with every name made private.
#
# Debian's build defines malloc, free and the rest unprefixed. They are renamed here and, but for
# the three calls that the host driver makes, hidden, so that a program's malloc stays what it is
# and a jemalloc of the program's own is another one. The C++ part (operator new) is left out.
#
# A library of its own, and not part of libtenure, because it needs 2.6 KB of static TLS, more than
# glibc keeps for libraries that are loaded later: with it inside, no program could dlopen
# libtenure. Programs that link the target tenure get it at their start: see
# alloc/driver_host_memory.h.

find_library(TENURE_JEMALLOC_ARCHIVE libjemalloc_pic.a)
if(NOT TENURE_JEMALLOC_ARCHIVE)
  message(FATAL_ERROR "libjemalloc_pic.a is missing: install libjemalloc-dev (./run does it)")
endif()

# Makes the target tenure_jemalloc.
function(tenure_add_jemalloc)
  set(names aligned_alloc calloc dallocx free mallctl mallctlbymib mallctlnametomib malloc
    malloc_conf malloc_conf_2_conf_harder malloc_message malloc_stats_print malloc_usable_size
    mallocx memalign nallocx posix_memalign pthread_atfork pvalloc rallocx realloc sallocx
    sdallocx valloc xallocx)
  list(TRANSFORM names REPLACE "(.+)" "\\1 tn__je_\\1" OUTPUT_VARIABLE renames)
  list(JOIN renames "\n" renames)
  set(directory ${CMAKE_BINARY_DIR}/jemalloc)
  file(CONFIGURE OUTPUT ${directory}/renames.txt CONTENT "${renames}\n")
  file(CONFIGURE OUTPUT ${directory}/exports.map CONTENT
    "{\n  global: tn__je_mallocx; tn__je_dallocx; tn__je_mallctl;\n  local: *;\n};\n")
  set(archive ${directory}/libjemalloc_private.a)
  add_custom_command(OUTPUT ${archive}
    COMMAND ${CMAKE_COMMAND} -E copy ${TENURE_JEMALLOC_ARCHIVE} ${archive}
    COMMAND ${CMAKE_AR} d ${archive} jemalloc_cpp.pic.o
    COMMAND ${CMAKE_OBJCOPY} --redefine-syms=${directory}/renames.txt ${archive}
    DEPENDS ${TENURE_JEMALLOC_ARCHIVE} ${directory}/renames.txt
    COMMENT "Making jemalloc's names private" VERBATIM)
  add_custom_target(tenure_jemalloc_archive DEPENDS ${archive})
  add_library(tenure_jemalloc SHARED cmake/jemalloc_settings.c)
  add_dependencies(tenure_jemalloc tenure_jemalloc_archive)
  target_link_options(tenure_jemalloc PRIVATE -Wl,--version-script=${directory}/exports.map)
  target_link_libraries(tenure_jemalloc PRIVATE -Wl,--whole-archive ${archive}
    -Wl,--no-whole-archive Threads::Threads ${CMAKE_DL_LIBS} m)
  set_target_properties(tenure_jemalloc PROPERTIES OUTPUT_NAME tenure-jemalloc
    C_VISIBILITY_PRESET default EXPORT_NAME tenure-jemalloc LINK_DEPENDS ${archive})
  set_property(GLOBAL APPEND PROPERTY TENURE_LIBRARIES tenure_jemalloc)
endfunction()

# Lets the library find it, and programs that link the library have it from their start. Libraries
# that link it do not need it: they too stay loadable by dlopen.
function(tenure_use_jemalloc name)
  tenure_add_jemalloc()
  set(is_program "$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>")
  set_target_properties(${name} PROPERTIES BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")
  target_link_options(${name} INTERFACE $<${is_program}:LINKER:--no-as-needed>)
  target_link_libraries(${name} INTERFACE $<${is_program}:$<TARGET_NAME:tenure_jemalloc>>)
  target_link_libraries(${name}-internal PUBLIC tenure_jemalloc)
  target_link_options(${name}-internal INTERFACE LINKER:--no-as-needed)
endfunction()
