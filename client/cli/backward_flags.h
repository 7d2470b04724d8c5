// SPDX-License-Identifier: Apache-2.0
//
// The flags that make `run` ask for gradients, and what it does with them.

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "client/call/attention_call.h"

namespace attend::client {

struct BackwardFlags {
  bool backward = false;
  std::string o, lse, d_o, d_lse;
  std::vector<std::string> gradients = {"d_q", "d_k", "d_v"};
};

void AddBackward(CLI::App* command, BackwardFlags* flags);

// Makes `call` one for gradients: its tensors from the files of `flags`, or from `safetensors` if
// that is not empty. O and LSE may be missing, both: they then have no shape.
Status FillBackward(const BackwardFlags& flags, const std::string& safetensors,
                    AttentionCall* call);

// Of an --out file: one gradient can be .npy, several need .safetensors.
Status CheckGradientsFile(const BackwardFlags& flags, const std::string& path);
Status WriteGradients(const std::string& path, const AttentionResult& result);
// Says what there is, and where it was written.
std::string DescribeGradients(const std::string& path, const AttentionResult& result);

}  // namespace attend::client
