// SPDX-License-Identifier: Apache-2.0
//
// The table of kernels/reference/smallest_faults.md: faults of the listed sizes are detected in the
// answers of each kernel, and much smaller ones are not.

#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

// A kernel whose answers are spoilt. Either pass returns false if the kernel does not support it.
struct JudgedKernel {
  bool unrounded;  // it is in the columns of kernels that keep weights in fp32
  bool rounded;    // and in those of kernels that round the weights of 16-bit problems
  std::function<bool(OwnedAttention*)> run;
  std::function<bool(OwnedAttention*, OwnedGradients*)> run_gradients;
};

size_t CountSmallestFaults();

// Expects a line of the table to be true for each of the kernels.
void ExpectSmallestFault(size_t line, std::span<const JudgedKernel> kernels);

// Prints the table with the values measured for them.
void PrintSmallestFaults(std::span<const JudgedKernel> kernels);

}  // namespace attend::test
