// SPDX-License-Identifier: Apache-2.0

#include "client/call/tree_mask.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/tree.h"

namespace attend::client {
namespace {

// The call's tree, whose shape is valid.
TreeView ViewOf(const AttentionCall& call) {
  const TensorRef& tree = *call.tree;
  return {static_cast<const uint8_t*>(tree.data), tree.shape[2],
          tree.shape[0] == 1 ? 0 : TreeBytes(tree.shape[2]),
          call.tree_lengths.empty() ? nullptr : call.tree_lengths.data()};
}

Status CheckShape(const TensorRef& tree, int64_t batch) {
  const std::vector<int64_t>& shape = tree.shape;
  const bool fits = tree.dtype == DType::kBit && shape.size() == 3 && shape[1] == shape[2] &&
                    (shape[0] == 1 || shape[0] == batch);
  if (!fits) {
    return InvalidArgument(
        "tree: shape " + ShapeText(shape) + " of " + std::string(DTypeName(tree.dtype)) +
        ", must be [1, T, T] or [B = " + std::to_string(batch) + ", T, T] of bits");
  }
  ATTEND_RETURN_IF_ERROR(CheckTreeTokens("T of tree", shape[2]));
  const int64_t bytes = shape[0] * TreeBytes(shape[2]);
  if (bytes == tree.bytes) return Status();
  return InvalidArgument("tree: " + std::to_string(tree.bytes) + " bytes given, shape " +
                         ShapeText(shape) + " needs " + std::to_string(bytes));
}

}  // namespace

Result<HostTensor> TreeFromParents(std::span<const int64_t> parents) {
  const Result<std::vector<uint8_t>> bits = attend::TreeFromParents(parents);
  if (!bits.ok()) return bits.status();
  const int64_t tokens = std::ssize(parents);
  Result<HostTensor> tensor = HostTensor::Make("tree", DType::kBit, {1, tokens, tokens});
  if (!tensor.ok()) return tensor;
  std::transform(bits->begin(), bits->end(), tensor->data.get(),
                 [](uint8_t byte) { return std::byte{byte}; });
  return tensor;
}

Status DescribeTree(const AttentionCall& call, Attention* attention) {
  const int64_t batch = attention->problem.batch;
  if (call.bias) return InvalidArgument("tree and bias are given, must be one of the two");
  ATTEND_RETURN_IF_ERROR(CheckShape(*call.tree, batch));
  const TreeView tree = ViewOf(call);
  if (tree.lengths != nullptr && std::ssize(call.tree_lengths) != batch) {
    return InvalidArgument("tree_lengths has " + std::to_string(call.tree_lengths.size()) +
                           " entries, must have B = " + std::to_string(batch) + " or none");
  }
  ATTEND_RETURN_IF_ERROR(CheckDrafts("tree_lengths", tree, *attention));
  return SetTreeBias(/*shared=*/false, attention).status();
}

Result<AttentionCall> WithTreeAsBias(const AttentionCall& call, Attention attention) {
  if (!call.tree) return call;
  ATTEND_RETURN_IF_ERROR(DescribeTree(call, &attention));
  const Problem& p = attention.problem;
  Result<HostTensor> bias = HostTensor::Make("tree", DType::kBit, {p.batch, 1, p.len_q, p.len_k});
  if (!bias.ok()) return bias.status();
  WriteTree(ViewOf(call), attention, reinterpret_cast<uint8_t*>(bias->data.get()));
  AttentionCall written = call;
  written.bias = *bias;
  written.tree.reset();
  written.tree_lengths.clear();
  return written;
}

Result<AttentionCall> WithTreeAsBias(const AttentionCall& call) {
  if (!call.tree) return call;
  const Result<Attention> described = Describe(call, nullptr, nullptr);
  if (!described.ok()) return described.status();
  return WithTreeAsBias(call, *described);
}

}  // namespace attend::client
