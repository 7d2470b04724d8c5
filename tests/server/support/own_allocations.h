// SPDX-License-Identifier: Apache-2.0
//
// Tells the owner of an allocation. gRPC does not survive std::bad_alloc, so a fault that is to be
// survived must hit the server's own code. Allocations of the C++ library, Protobuf and the like
// belong to their caller.

#pragma once

namespace attend::test {

// Reads this program's symbols. To be called before OfOwnCode.
void LearnOwnCode();
// Whether the current allocation is the server's own, judged by the call stack.
bool OfOwnCode();

}  // namespace attend::test
