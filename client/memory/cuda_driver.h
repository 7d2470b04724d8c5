// SPDX-License-Identifier: Apache-2.0
//
// The few CUDA driver functions needed to lend memory, loaded at run time: the build needs no CUDA,
// and on a machine without a GPU Get() reports that. Usable on any thread.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::client {

// The driver's ABI, with cuda.h's names.
struct CudaDriver {
  using Result = int;  // 0: success
  using Device = int;
  using Context = void*;
  using Event = void*;
  using Stream = void*;
  using Pointer = unsigned long long;
  struct Uuid {
    char bytes[16];
  };
  struct IpcHandle {
    char bytes[64];
  };
  static constexpr unsigned kEventIpc = 2 | 4;  // CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
  static constexpr int kPointerDevice = 9;      // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

  Result (*init)(unsigned);
  Result (*device_get_count)(int*);
  Result (*device_get)(Device*, int);
  Result (*device_get_uuid)(Uuid*, Device);
  Result (*primary_retain)(Context*, Device);
  Result (*primary_release)(Device);
  Result (*push_current)(Context);
  Result (*pop_current)(Context*);
  Result (*synchronize)();
  Result (*mem_alloc)(Pointer*, size_t);
  Result (*mem_free)(Pointer);
  Result (*copy_to_device)(Pointer, const void*, size_t);
  Result (*copy_to_host)(void*, Pointer, size_t);
  Result (*copy_async)(Pointer, Pointer, size_t, Stream);  // host addresses too
  Result (*stream_synchronize)(Stream);
  Result (*stream_query)(Stream);  // 0: all enqueued work has run
  Result (*stream_wait_event)(Stream, Event, unsigned);
  Result (*address_range)(Pointer*, size_t*, Pointer);
  Result (*pointer_attribute)(void*, int, Pointer);
  Result (*ipc_mem_handle)(IpcHandle*, Pointer);
  Result (*ipc_event_handle)(IpcHandle*, Event);
  Result (*event_create)(Event*, unsigned);
  Result (*event_record)(Event, Stream);
  Result (*event_destroy)(Event);
  Result (*error_name)(Result, const char**);

  // Loaded and initialised once, for the life of the process. FAILED_PRECONDITION: there is no
  // driver, it is too old, or it finds no GPU.
  static attend::Result<const CudaDriver*> Get();

  // OK for 0; otherwise an error with the driver's name for `result`.
  Status Check(Result result, const std::string& what) const;
};

}  // namespace attend::client
