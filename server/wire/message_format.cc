// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_format.h"

#include <utility>

#include "server/wire/reply_codec.h"

namespace attend {
namespace {

class Format final : public MessageFormat {
 public:
  Status Scan(RequestMessage& message, Request& request) const override {
    Status status = ScanMessage(message.slices, message.scan);
    if (status.ok()) return status;
    // The part before the error may contain the request id.
    google::protobuf::Arena arena;
    if (ParseMessage(arena, message).ok()) request.request_id = message.fields->request_id();
    message.fields = nullptr;
    return status;
  }
  Status Parse(google::protobuf::Arena& arena, MessageSlices&, RequestMessage& message,
               Request&) const override {
    return ParseMessage(arena, message);
  }
  OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns) const override {
    return attend::EncodeReply(std::move(request), total_ns);
  }
  OutMessage EncodeFailure(const std::string& answer_id, const Status& status,
                           const CacheRefusal& refusal, int64_t retry_after_ms) const override {
    return attend::EncodeFailure(answer_id, status, refusal, retry_after_ms);
  }
};

}  // namespace

const MessageFormat& AttendFormat() {
  static const Format format;
  return format;
}

}  // namespace attend
