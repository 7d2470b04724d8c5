// SPDX-License-Identifier: Apache-2.0
//
// Where a chunked request's bytes go from its input block: into the device's copy of it, if there
// is one, and from there to the parts of the request that they make ready. Valid as long as the
// request's source, and what it does not own.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/request/input_source.h"
#include "server/upload/upload_run.h"
#include "server/util/byte_ranges.h"

namespace attend {

class UploadSink {
 public:
  UploadSink() = default;  // has no copy
  explicit UploadSink(InputSource& source) : copy_(source.copy()), run_(source.run()) {}

  // Bytes of a tensor have arrived in the block. Returns the pieces that they complete, for Copy.
  // Does not touch the device. Thread-safe; each byte once.
  std::vector<ByteRange> Arrived(const char* data, int64_t bytes) const {
    if (copy_ == nullptr || bytes == 0) return {};
    return copy_->Arrived(data, bytes);
  }
  // Copies `pieces`, and starts the parts that now have all their bytes. Thread-safe, but not on
  // gRPC's threads.
  void Copy(std::span<const ByteRange> pieces) const {
    if (copy_->Copy(pieces) && run_ != nullptr) run_->Copied(pieces);
  }

 private:
  DeviceCopy* copy_ = nullptr;
  UploadRun* run_ = nullptr;
};

}  // namespace attend
