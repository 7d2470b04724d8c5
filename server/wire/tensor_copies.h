// SPDX-License-Identifier: Apache-2.0
//
// The copies that bring a decoded request's tensors to their places in its input block. The blocks
// have the plan's sizes. Pure; any thread.

#pragma once

#include <vector>

#include "kernels/contract/backend.h"
#include "server/memory/copy_pieces.h"
#include "server/request/request.h"
#include "server/wire/request_codec.h"

namespace attend {

// Copies the inline tensors' bytes to their places, but for those in files.
void CopyTensors(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request);
// The same as pieces of a copy that the caller makes while the message lives.
std::vector<HostPiece> TensorPieces(const RequestMessage& message, const Validated& validated,
                                    const MemoryPlan& plan, Request& request);
// Of those in files.
std::vector<FilePiece> TensorFiles(const RequestMessage& message, const Validated& validated,
                                   const MemoryPlan& plan, Request& request);

}  // namespace attend
