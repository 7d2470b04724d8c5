# SPDX-License-Identifier: Apache-2.0
# Copies headers (HEADERS, joined by commas, below SOURCE) to OUT, where they include each other as
# attend/... (AttendPackage.cmake). Run by cmake -P.

string(REPLACE "," ";" headers "${HEADERS}")
foreach(header IN LISTS headers)
  file(READ "${SOURCE}/${header}" text)
  string(REGEX REPLACE "#include \"(client|kernels|proto)/" "#include \"attend/\\1/"
         text "${text}")
  file(WRITE "${OUT}/${header}" "${text}")
endforeach()
