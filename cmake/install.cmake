# cmake --install --component c: headers, shared library, pkg-config file, CMake package.
# The component `python` is what a wheel takes.
include(CMakePackageConfigHelpers)

install(TARGETS penstock EXPORT penstock LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c)
install(DIRECTORY include/penstock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT c)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
install(EXPORT penstock NAMESPACE penstock:: FILE penstock-targets.cmake
        DESTINATION ${package_dir} COMPONENT c)
configure_package_config_file(cmake/penstock-config.cmake.in penstock-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(penstock-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/penstock-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/penstock-config-version.cmake
        DESTINATION ${package_dir} COMPONENT c)

# Relative to its own place, so that an installed tree can be moved.
file(RELATIVE_PATH PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/penstock.pc.in penstock.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/penstock.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT c)
