// SPDX-License-Identifier: Apache-2.0
//
// Admission of a request before its bytes are copied: its place among the tenant's requests,
// memory, and charges beyond its message.
//
// Checks that can never succeed come first and are INVALID_ARGUMENT (do not retry); only then are
// the upload budget and memory taken, whose shortage is RESOURCE_EXHAUSTED.

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "server/rpc/request_reader.h"
#include "server/util/rejection.h"
#include "server/wire/early_input.h"

namespace attend {
namespace {

// For a request that can never fit.
Status TooLarge(const MemoryPlan& plan, const std::string& bound) {
  return InvalidArgument("the request's tensors take " + std::to_string(plan.input_bytes) +
                         " bytes and its answer " + std::to_string(plan.output_bytes) + ", " +
                         bound);
}

std::string BoundOf(const HostPool& pool, int tenant) {
  const std::string budget = "the memory budget of " + std::to_string(pool.budget_bytes());
  if (pool.own_bytes(tenant) == 0) return "together more than " + budget;
  return "and both must fit, each in one piece, into the tenant's part of " + budget +
         ", which has " + std::to_string(pool.own_bytes(tenant)) + ", and its common part of " +
         std::to_string(pool.block_bytes_max());
}

}  // namespace

Status RequestReader::OfTenant(Status status, Request& request) {
  if (!status.ok()) request.refusal.retry_after_ms = request.limits.retry_after_ms();
  return status;
}

Status RequestReader::EnterTenant(Request& request) {
  const bool checked = request.check == AnswerCheck::kAsked;
  return OfTenant(tenants_.Begin(request.tenant, checked, request.limits, request.message_bytes),
                  request);
}

Status RequestReader::ChargeTenant(const Validated& validated, Request& request) {
  int64_t bytes = validated.tree_bytes;
  for (int i = 0; i < kTensorsMax; ++i)
    bytes += validated.present[i] ? validated.tensor_bytes[i] : 0;
  for (const OutputTensor& each : OutputsOf(request)) {
    bytes += each.bytes;
  }
  // The cheapest device, because the tenant does not choose which one it will be.
  double cost = std::numeric_limits<double>::max();
  for (const Candidate& each : request.placement.candidates) {
    cost = std::min(cost, each.kernel_cost);
  }
  return OfTenant(tenants_.Charge(bytes, cost, request.limits), request);
}

Status RequestReader::Admit(const RequestMessage& message, Request& request,
                            const Validated& validated, const MemoryPlan& plan) {
  // The bound of one message; chunked answers are bounded by the budget alone.
  const int64_t answer_bytes =
      plan.output_bytes -
      (request.lse_for_check ? BytesLse(validated.attention.problem) : int64_t{0});
  if (request.transport != Transport::kChunked && answer_bytes > limits_.answer_bytes_max) {
    return Because(
        Rejection::kTooLarge,
        InvalidArgument("the answer would have " + std::to_string(answer_bytes) +
                        " tensor bytes, must have at most " +
                        std::to_string(limits_.answer_bytes_max) + " (--max-request-bytes)"));
  }
  const bool chunked = request.transport == Transport::kChunked;
  const HostPool& pool = engine_.host_pool();
  const int64_t bound = chunked ? uploads_.bytes_max(request.tenant) : pool.budget_bytes();
  const int64_t input = HostPool::BlockBytes(plan.input_bytes);
  const int64_t output = HostPool::BlockBytes(plan.output_bytes);
  // Sizes are claimed by a chunked request's header: their sum may overflow.
  const bool beyond = input > bound || output > bound - input;
  if (beyond || !pool.CouldTake(request.tenant, plan.input_bytes, plan.output_bytes)) {
    // Never, rather than later: the client must not retry.
    const std::string uploads = "together more than the tenant's " + std::to_string(bound) +
                                " for incomplete uploads, out of the memory budget of " +
                                std::to_string(pool.budget_bytes());
    return Because(Rejection::kTooLarge,
                   TooLarge(plan, chunked && beyond ? uploads : BoundOf(pool, request.tenant)));
  }
  UploadBudget::Hold upload;
  if (chunked) {
    Result<UploadBudget::Hold> taken = uploads_.Take(request.tenant, input + output);
    if (!taken.ok()) return taken.status();
    upload = std::move(*taken);
  }
  HostBlock early;
  if (message.early != nullptr && message.early->Fits(message.scan, plan, validated)) {
    early = message.early->TakeBlock();
  }
  Result<Admission> admission =
      engine_.Admit(validated.attention.problem, request.kernel, plan.input_bytes,
                    plan.output_bytes, request.tenant, request.source.pinned_device(),
                    validated.gradients ? Pass::kBackward : Pass::kForward, std::move(early));
  if (!admission.ok()) return admission.status();
  request.input = std::move(admission->input);
  request.output = std::move(admission->output);
  request.placement = std::move(admission->placement);
  request.upload = std::move(upload);
  return Status();
}

}  // namespace attend
