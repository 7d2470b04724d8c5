// SPDX-License-Identifier: Apache-2.0
//
// How much memory a piece of code has allocated at a time. Replaces operator new of the test that
// links it; counts every thread, so nothing else may run meanwhile.

#pragma once

#include <cstdint>
#include <functional>

namespace attend::test {

// The peak number of bytes that `body` held.
int64_t MostAllocated(const std::function<void()>& body);

}  // namespace attend::test
