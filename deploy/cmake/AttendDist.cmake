# SPDX-License-Identifier: Apache-2.0
# Installing and shipping:
#   cmake --install build/release --prefix /opt/attend    the two binaries and libattend_kernels.so,
#                                                         with this machine's libraries
#   cmake --build build/release --target dist             dist/: the binaries and every library
#                                                         they need, to be moved as one folder
# Binaries look for libraries beside themselves first. It must be DT_RPATH, not DT_RUNPATH: only
# the former is also searched for what the libraries need in turn.

set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib")
set(CMAKE_BUILD_RPATH "$ORIGIN/../lib")  # so that a test binary can be copied into a dist/ as it is
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
add_link_options(LINKER:--disable-new-dtags)

set(ATTEND_DIST_DIR "${CMAKE_SOURCE_DIR}/dist" CACHE PATH "Where the target dist puts its folder")

# Called at the end of the top folder, when the targets exist.
function(attend_install)
  if(NOT TARGET attend-server OR NOT TARGET attend-client)
    return()
  endif()
  install(TARGETS attend-server attend-client RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
  install(FILES ${CMAKE_SOURCE_DIR}/proto/attend/v1/attention.proto
                ${CMAKE_SOURCE_DIR}/proto/attend/v1/shared_memory.proto
          DESTINATION ${CMAKE_INSTALL_DATADIR}/attend/proto/attend/v1)
  add_custom_target(
    dist
    COMMAND ${CMAKE_SOURCE_DIR}/deploy/make-dist ${CMAKE_BINARY_DIR} ${ATTEND_DIST_DIR}
    DEPENDS attend-server attend-client attend_kernels_c
    USES_TERMINAL VERBATIM)
endfunction()
cmake_language(DEFER CALL attend_install)
