// SPDX-License-Identifier: Apache-2.0

#include "server/device/completion.h"

#include <algorithm>

namespace attend {
namespace {

// Splits the batch into at most `count` parts with the same outcome and consecutive requests.
std::vector<CompletedBatch> Spread(CompletedBatch batch, size_t count) {
  const size_t requests = batch.requests.size();
  std::vector<CompletedBatch> parts;
  count = std::min(count, requests);
  if (count <= 1) {
    parts.push_back(std::move(batch));
    return parts;
  }
  const std::vector<Status> statuses = std::move(batch.outcome.statuses);
  batch.outcome.statuses.clear();
  for (size_t n = 0; n < count; ++n) {
    CompletedBatch part{batch.device, {}, batch.outcome};
    for (size_t i = requests * n / count; i < requests * (n + 1) / count; ++i) {
      part.requests.push_back(std::move(batch.requests[i]));
      part.outcome.statuses.push_back(statuses[i]);
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace

void CompletionThreads::Post(CompletedBatch batch) {
  auto parts = std::make_shared<std::vector<CompletedBatch>>(
      Spread(std::move(batch), static_cast<size_t>(workers_.size())));
  const size_t count = parts->size();
  workers_.Post(
      count, [this, parts = std::move(parts)](size_t n) { handler_(std::move((*parts)[n])); }, {});
}

}  // namespace attend
