# SPDX-License-Identifier: Apache-2.0
# Installing and shipping:
#   cmake --install build/release --prefix /opt/attend    programs and libraries, which need this
#                                                         machine's; --component runtime: those;
#                                                         dev: what C++ needs (AttendPackage.cmake)
#   cmake --build build/release --target dist             dist/: the binaries and every library
#                                                         they need, to be moved as one folder
# Binaries look for libraries beside themselves first. It must be DT_RPATH, not DT_RUNPATH: only
# the former is also searched for what the libraries need in turn.
# Installed binaries are linked with the path that they keep (BUILD_WITH_INSTALL_RPATH): CMake pads
# a path that install changes, and the padding ends in an empty element, the current folder.

set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib")
set(CMAKE_BUILD_RPATH "$ORIGIN/../lib")  # a test binary can be copied unchanged into a dist/
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
add_link_options(LINKER:--disable-new-dtags)

set(ATTEND_DIST_DIR "${PROJECT_SOURCE_DIR}/dist" CACHE PATH "Where the target dist puts its folder")

# Called at the end of the top folder, when the targets exist.
function(attend_install)
  if(NOT ATTEND_INSTALL)
    return()
  endif()
  # Beside lib/, where the modules look for the libraries.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/client/python/attend
                    ${PROJECT_SOURCE_DIR}/kernels/python/attend_kernels
          DESTINATION python COMPONENT runtime
          FILES_MATCHING PATTERN "*.py" PATTERN py.typed PATTERN __pycache__ EXCLUDE)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE
          DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/attend ${PROJECT_SOURCE_DIR}/proto/inference
          DESTINATION ${CMAKE_INSTALL_DATADIR}/attend/proto COMPONENT runtime
          FILES_MATCHING PATTERN "*.proto")
  if(NOT ATTEND_PROGRAMS)
    return()
  endif()
  # Tools that a server's operator needs: bash scripts, without libraries.
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/deploy/make-test-ca ${PROJECT_SOURCE_DIR}/deploy/make-token
          DESTINATION ${CMAKE_INSTALL_DATADIR}/attend COMPONENT runtime)
  install(TARGETS attend-server attend-client
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  add_custom_target(
    dist
    COMMAND ${PROJECT_SOURCE_DIR}/deploy/make-dist ${PROJECT_BINARY_DIR} ${ATTEND_DIST_DIR}
    DEPENDS attend-server attend-client attend_client_c attend_kernels_c
    USES_TERMINAL VERBATIM)
endfunction()
cmake_language(DEFER CALL attend_install)
