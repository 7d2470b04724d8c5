// SPDX-License-Identifier: Apache-2.0
//
// Who owns an allocation. gRPC does not survive std::bad_alloc, so a fault that is to be survived
// must meet the server's own code. What the C++ library, Protobuf and the like take belongs to
// whoever called them.

#pragma once

namespace attend::test {

// Reads this program's symbols. Before the first call of the other.
void LearnOwnCode();
// Whether the allocation that this is called from is the server's own, by the stack of calls.
bool OfOwnCode();

}  // namespace attend::test
