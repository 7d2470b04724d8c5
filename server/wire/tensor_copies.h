// SPDX-License-Identifier: Apache-2.0
//
// The copies that bring a decoded request's tensors to their places in its input block. The blocks
// must have the planned sizes. Pure; any thread.

#pragma once

#include <vector>

#include "kernels/contract/backend.h"
#include "server/memory/copy_pieces.h"
#include "server/request/request.h"
#include "server/wire/request_codec.h"

namespace attend {

// Copies the inline tensors to their places, except those in files.
void CopyTensors(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request);
// The same, as pieces of a copy to be made while the message lives.
std::vector<HostPiece> TensorPieces(const RequestMessage& message, const Validated& validated,
                                    const MemoryPlan& plan, Request& request);
// The copies of tensors that are in files.
std::vector<FilePiece> TensorFiles(const RequestMessage& message, const Validated& validated,
                                   const MemoryPlan& plan, Request& request);

}  // namespace attend
