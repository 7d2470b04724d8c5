// SPDX-License-Identifier: Apache-2.0

#include "server/net/guarded_functions.h"

#include <dlfcn.h>

#include <string>

namespace attend {

Status CheckFunctions(std::span<const char* const> names) {
  for (const char* const name : names) {
    if (dlsym(RTLD_NEXT, name) != nullptr) continue;
    return Unimplemented(std::string("no library that was loaded has the function ") + name +
                         ", which this server looks at connections with; use the libgrpc and "
                         "libssl that it was built with");
  }
  return Status();
}

}  // namespace attend
