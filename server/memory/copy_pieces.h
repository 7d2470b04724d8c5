// SPDX-License-Identifier: Apache-2.0
//
// Copies the bytes of large messages to their places on threads made for it, so that gRPC's few
// threads never spend long in a memcpy. One copy is split by bytes over the threads.

#pragma once

#include <functional>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/util/worker_threads.h"

namespace attend {

// Copies all pieces, then calls `done` once on one of the threads. Thread-safe; never waits.
void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done);

}  // namespace attend
