// SPDX-License-Identifier: Apache-2.0
//
// The flags with which `run` computes gradients, and their use.

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

// Makes `call` a gradient call, with its tensors from the files of `flags`, or from `safetensors`
// if that is not empty. O and LSE may both be missing: they then have no shape.
Status FillBackward(const BackwardFlags& flags, const std::string& safetensors,
                    AttentionCall* call);

// Checks an --out file: one gradient may be .npy, several need .safetensors.
Status CheckGradientsFile(const BackwardFlags& flags, const std::string& path);
Status WriteGradients(const std::string& path, const AttentionResult& result);
// Describes the gradients and where they were written.
std::string DescribeGradients(const std::string& path, const AttentionResult& result);

}  // namespace attend::client
