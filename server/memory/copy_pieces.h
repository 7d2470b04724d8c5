// SPDX-License-Identifier: Apache-2.0
//
// Copies the bytes of large messages on dedicated threads, so that the transport's loops never
// spend long in memcpy. A copy is split over the threads by bytes.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/memory/shared_file.h"
#include "server/util/thresholds.h"
#include "server/util/worker_threads.h"

namespace attend {

// A range of a file to read or write; without a file, memory to copy.
struct FilePiece {
  const SharedFile* file = nullptr;
  int64_t offset = 0;
  void* to = nullptr;          // set for a read
  const void* from = nullptr;  // set for a write
  int64_t bytes = 0;

  Status Copy() const {
    if (file == nullptr) return std::memcpy(to, from, static_cast<size_t>(bytes)), Status();
    return to != nullptr ? file->Read(offset, to, bytes) : file->Write(offset, from, bytes);
  }
};

// Whether this many bytes are parsed or copied on the thread that has them: handing them over would
// cost more. A thread that serves connections hands over everything larger.
inline bool StaysOnThread(int64_t bytes) { return bytes <= thresholds::kOwnThreadBytesMax; }

// Copies all pieces, then calls `done` once on one of the threads. Thread-safe; never waits.
void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done);
// The same with files, which must outlive the copy. `done` receives the first error.
void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                const std::vector<FilePiece>& files, std::function<void(const Status&)> done);

}  // namespace attend
