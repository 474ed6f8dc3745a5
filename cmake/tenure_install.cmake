# Installed: libraries, headers as <tenure/...>, programs, find_package(tenure), and for pkg-config
# tenure, tenure-ops, tenure-dist and tenure-adapters. The installed tree can be moved: nothing in
# it names its own folder.
include(CMakePackageConfigHelpers)

get_property(libraries GLOBAL PROPERTY TENURE_LIBRARIES)
foreach(library ${libraries})
  get_target_property(headers ${library} PUBLIC_HEADERS)
  if(headers)
    install(FILES ${headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tenure)
  endif()
endforeach()
install(TARGETS ${libraries} EXPORT tenure-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(program tenure tenure-demo)
  if(TARGET ${program}-program)
    install(TARGETS ${program}-program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()

install(DIRECTORY docs/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 FILES_MATCHING PATTERN "*.1")
install(FILES docs/completion/tenure.bash RENAME tenure
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES docs/completion/_tenure DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES docs/completion/tenure.fish
  DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tenure)
install(EXPORT tenure-targets NAMESPACE tenure:: DESTINATION ${package_dir})
configure_package_config_file(cmake/tenure-config.cmake.in
  ${CMAKE_BINARY_DIR}/tenure-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tenure-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tenure-config.cmake
  ${CMAKE_BINARY_DIR}/tenure-config-version.cmake DESTINATION ${package_dir})

set(pkg_config_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH TENURE_PC_TO_PREFIX ${pkg_config_dir} ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" TENURE_PC_TO_PREFIX "${TENURE_PC_TO_PREFIX}")
foreach(package tenure tenure-ops tenure-dist tenure-adapters)
  if(TARGET ${package})
    configure_file(cmake/${package}.pc.in ${CMAKE_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${CMAKE_BINARY_DIR}/${package}.pc
      DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  endif()
endforeach()
