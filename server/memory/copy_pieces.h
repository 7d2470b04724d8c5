// SPDX-License-Identifier: Apache-2.0
//
// Copies the bytes of large messages to their places on threads made for it, so that gRPC's few
// threads never spend long in a memcpy. One copy is split by bytes over the threads.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/memory/shared_file.h"
#include "server/util/thresholds.h"
#include "server/util/worker_threads.h"

namespace attend {

// Bytes to be read from a file, or to be written there.
struct FilePiece {
  const SharedFile* file = nullptr;
  int64_t offset = 0;
  void* to = nullptr;          // read there, or
  const void* from = nullptr;  // written from there
  int64_t bytes = 0;

  Status Copy() const {
    return to != nullptr ? file->Read(offset, to, bytes) : file->Write(offset, from, bytes);
  }
};

// Whether so many bytes stay on the thread that has them, which parses or copies them itself: a
// hand-over would cost more. A thread that serves connections hands over all else.
inline bool StaysOnThread(int64_t bytes) { return bytes <= thresholds::kOwnThreadBytesMax; }

// Copies all pieces, then calls `done` once on one of the threads. Thread-safe; never waits.
void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done);
// The same of files too, which must outlive the copy. `done` gets the first error.
void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                const std::vector<FilePiece>& files, std::function<void(const Status&)> done);

}  // namespace attend
