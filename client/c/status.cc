// SPDX-License-Identifier: Apache-2.0

#include "client/c/status.h"

#include <string>

#include "client/c/attend_client.h"

namespace attend::client::c {
namespace {

thread_local std::string last_error;

}  // namespace

int32_t Return(const Status& status) {
  if (!status.ok()) last_error = status.message();
  return static_cast<int32_t>(status.code());
}

Status NotNull(const char* name, const void* value) {
  return value == nullptr ? InvalidArgument(std::string(name) + " is NULL") : Status();
}

Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected) {
  if (bytes == expected) return Status();
  return InvalidArgument(std::string(name) + ".struct_bytes is " + std::to_string(bytes) +
                         ", must be " + std::to_string(expected) +
                         ": the caller was compiled for another version");
}

}  // namespace attend::client::c

extern "C" const char* attend_client_last_error(void) {
  return attend::client::c::last_error.c_str();
}
