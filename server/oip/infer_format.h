// SPDX-License-Identifier: Apache-2.0
//
// ModelInfer and ModelStreamInfer as a MessageFormat. Code between it and the engine does not know
// which protocol a request arrived by.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/oip/model_statistics.h"
#include "server/oip/region_names.h"
#include "server/wire/message_format.h"

namespace attend::oip {

class InferFormat final : public MessageFormat {
 public:
  enum class Call { kUnary, kStream };
  // Both must outlive the format.
  InferFormat(Call call, const RegionNames& regions, ModelStatistics& statistics)
      : call_(call), regions_(regions), statistics_(statistics) {}

  Status Scan(RequestMessage& message, Request& request) const override;
  Status Parse(google::protobuf::Arena& arena, MessageSlices& slices, RequestMessage& message,
               Request& request) const override;
  Status CheckPlaces(const Validated& validated, Request& request) const override;
  std::vector<FilePiece> OutputFiles(const Request& request) const override;
  void CountEnd(const Request& request, int64_t total_ns) const override;
  OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns) const override;
  bool InOrder() const override { return true; }
  std::string AnswerId(const Request& request) const override;
  OutMessage EncodeFailure(const std::string& answer_id, const Status& status,
                           const CacheRefusal& refusal, int64_t retry_after_ms) const override;

 private:
  const Call call_;
  const RegionNames& regions_;
  ModelStatistics& statistics_;
};

}  // namespace attend::oip
