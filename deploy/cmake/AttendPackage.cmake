# SPDX-License-Identifier: Apache-2.0
# The targets that other projects link, the same by all three ways:
#   attend::client          the C++ client library, one archive
#   attend::receive_blocks  its malloc for receive buffers, for programs that want it
#   attend::client_c        libattend_client.so, the client's C interface
#   attend::kernels         libattend_kernels.so with its C interface
# by add_subdirectory(attend), by find_package(attend) after cmake --install, and by pkg-config.
#
# Headers are included as <attend/client/client.h>. Those of the tree include each other from the
# top folder; copies for others say attend/ before, so that a client/client.h of another project is
# never taken for ours.

set(attend_include_dir ${PROJECT_BINARY_DIR}/include)
set(attend_client_headers
  client/call/attention_call.h
  client/call/backward_call.h
  client/call/call_handle.h
  client/call/call_options.h
  client/call/merge_partial.h
  client/call/random.h
  client/call/retry_policy.h
  client/call/server_address.h
  client/call/shared_call.h
  client/call/tensor.h
  client/call/tls_options.h
  client/call/tree_mask.h
  client/client.h
  client/memory/cuda_driver.h
  client/memory/cuda_memory.h
  client/memory/device_memory.h
  client/memory/shared_memory.h
  client/session.h
  client/sharded_session.h
  client/stream.h
  client/wire/message_codec.h
  kernels/contract/dropout.h
  kernels/contract/dtype.h
  kernels/contract/gradients.h
  kernels/contract/portable.h
  kernels/contract/problem.h
  kernels/contract/stop_flag.h
  kernels/reference/check_rows.h
  kernels/util/clock.h
  kernels/util/mutex.h
  kernels/util/status.h
  proto/process/process_settings.h
  proto/process/receive_blocks.h
)
set(attend_kernels_header kernels/c/attend_c.h)  # as <attend/attend_c.h>

set(attend_copies ${attend_client_headers})
list(TRANSFORM attend_copies PREPEND ${attend_include_dir}/attend/)
list(TRANSFORM attend_client_headers PREPEND ${PROJECT_SOURCE_DIR}/
     OUTPUT_VARIABLE attend_originals)
list(JOIN attend_client_headers "," attend_joined)
add_custom_command(
  OUTPUT ${attend_copies}
  COMMAND ${CMAKE_COMMAND} -D SOURCE=${PROJECT_SOURCE_DIR} -D OUT=${attend_include_dir}/attend
          -D HEADERS=${attend_joined} -P ${CMAKE_CURRENT_LIST_DIR}/copy_headers.cmake
  DEPENDS ${attend_originals} ${CMAKE_CURRENT_LIST_DIR}/copy_headers.cmake
  COMMENT "Copying the public headers"
  VERBATIM)
add_custom_target(attend_client_headers DEPENDS ${attend_copies})
configure_file(${PROJECT_SOURCE_DIR}/${attend_kernels_header}
               ${attend_include_dir}/attend/attend_c.h COPYONLY)
configure_file(${PROJECT_SOURCE_DIR}/client/c/attend_client.h
               ${attend_include_dir}/attend/attend_client.h COPYONLY)

set(attend_public_include "$<BUILD_INTERFACE:${attend_include_dir}>"
                          "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")

# Called at the end of the top folder, when the targets exist.
function(attend_package)
  # The parts of the tree as one archive: none of their settings propagate to a target that links
  # it. Not named libattend_client.a: the linker would then take the C interface's shared library,
  # which lies beside it, instead.
  add_library(attend_client_archive STATIC
    $<TARGET_OBJECTS:attend_client> $<TARGET_OBJECTS:attend_process_settings>
    $<TARGET_OBJECTS:attend_messages> $<TARGET_OBJECTS:attend_proto>
    $<TARGET_OBJECTS:attend_reference>)
  add_dependencies(attend_client_archive attend_client_headers)
  target_compile_features(attend_client_archive PUBLIC cxx_std_20)
  target_include_directories(attend_client_archive INTERFACE
    ${attend_public_include} "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/proto/generated>")
  target_link_libraries(attend_client_archive
    PUBLIC gRPC::grpc++ protobuf::libprotobuf Threads::Threads
    PRIVATE absl::synchronization ${CMAKE_DL_LIBS})
  set_target_properties(attend_client_archive PROPERTIES
    LINKER_LANGUAGE CXX OUTPUT_NAME attend_client++ EXPORT_NAME client)

  add_library(attend_receive_blocks_archive STATIC $<TARGET_OBJECTS:attend_receive_blocks>)
  target_link_libraries(attend_receive_blocks_archive PUBLIC attend_client_archive)
  set_target_properties(attend_receive_blocks_archive PROPERTIES
    LINKER_LANGUAGE CXX OUTPUT_NAME attend_receive_blocks EXPORT_NAME receive_blocks)

  foreach(name kernels client)
    target_include_directories(attend_${name}_c INTERFACE ${attend_public_include})
  endforeach()
  set_target_properties(attend_kernels_c PROPERTIES EXPORT_NAME kernels)
  set_target_properties(attend_client_c PROPERTIES EXPORT_NAME client_c)

  add_library(attend::client ALIAS attend_client_archive)
  add_library(attend::receive_blocks ALIAS attend_receive_blocks_archive)
  add_library(attend::client_c ALIAS attend_client_c)
  add_library(attend::kernels ALIAS attend_kernels_c)
  if(ATTEND_INSTALL)
    attend_install_package()
  endif()
endfunction()
cmake_language(DEFER CALL attend_package)

function(attend_install_package)
  include(CMakePackageConfigHelpers)
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/attend)
  install(TARGETS attend_client_archive attend_receive_blocks_archive EXPORT attend_client
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
  install(TARGETS attend_kernels_c EXPORT attend_kernels
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)
  install(TARGETS attend_client_c EXPORT attend_client_c
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)
  foreach(part kernels client client_c)
    install(EXPORT attend_${part} FILE attend_${part}.cmake NAMESPACE attend::
            DESTINATION ${config_dir} COMPONENT dev)
  endforeach()
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/attendConfig.cmake.in attendConfig.cmake @ONLY)
  write_basic_package_version_file(attendConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attendConfig.cmake
                ${CMAKE_CURRENT_BINARY_DIR}/attendConfigVersion.cmake
          DESTINATION ${config_dir} COMPONENT dev)
  # Relative to lib/pkgconfig, so that the folder can be moved.
  file(RELATIVE_PATH attend_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" attend_pc_prefix "${attend_pc_prefix}")
  foreach(name attend-client attend-client-c attend-kernels)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.pc.in ${name}.pc @ONLY)
    install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc
            DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)
  endforeach()
  install(DIRECTORY ${attend_include_dir}/attend DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
          COMPONENT dev)
  install(DIRECTORY ${PROJECT_BINARY_DIR}/proto/generated/attend
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
          FILES_MATCHING PATTERN "*.pb.h" PATTERN shared_memory.pb.h EXCLUDE)
endfunction()
