// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/health_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

namespace proto = grpc::health::v1;
using proto::HealthCheckResponse;
using ServingStatus = HealthCheckResponse::ServingStatus;

// No service has so long a name.
constexpr size_t kRequestBytesMax = 4096;

// The message that says so; made without memory of its own but the slice's.
grpc::ByteBuffer MessageOf(ServingStatus status) {
  constexpr char kField = 0x08;
  const char bytes[] = {kField, static_cast<char>(status)};
  const grpc::Slice slice(bytes, sizeof(bytes));  // held inside the slice
  return grpc::ByteBuffer(&slice, 1);
}

ServingStatus StatusOf(bool serving) {
  return serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

// A watch that is refused.
class EndedWatch final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit EndedWatch(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

// Tells its client each change, and only the last where it reads slowly. Used with the service's
// mutex held.
class HealthService::Watcher final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  Watcher(HealthService& service, bool known, Marks marks)
      : service_(service), known_(known), marks_(std::move(marks)) {}

  const Marks& marks() const { return marks_; }

  void Tell(bool serving) {
    now_ = known_ ? StatusOf(serving) : HealthCheckResponse::SERVICE_UNKNOWN;
    Write();
  }
  void End(const grpc::Status& status) {
    if (std::exchange(ended_, true)) return;
    Finish(status);
  }

 private:
  void OnWriteDone(bool ok) override {
    const MutexLock lock(service_.mutex_);
    writing_ = false;
    if (!ok) return End(grpc::Status::CANCELLED);
    Write();
  }
  void OnCancel() override {
    const MutexLock lock(service_.mutex_);
    End(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    service_.Remove(this);
    delete this;
  }
  void Write() {
    if (ended_ || writing_ || now_ == told_) return;
    writing_ = true;
    told_ = now_;
    bytes_ = MessageOf(told_);
    StartWrite(&bytes_);
  }

  HealthService& service_;
  const bool known_;
  const Marks marks_;  // of its connection, or null
  ServingStatus now_ = HealthCheckResponse::UNKNOWN;
  ServingStatus told_ = HealthCheckResponse::UNKNOWN;
  bool writing_ = false;
  bool ended_ = false;
  grpc::ByteBuffer bytes_;
};

HealthService::HealthService(const std::vector<std::string>& services,
                             const ConnectionHolds* connections)
    : connections_(connections), services_([&services] {
        std::set<std::string> all(services.begin(), services.end());
        all.insert("");
        return all;
      }()) {}

void HealthService::SetServing(bool serving) {
  const MutexLock lock(mutex_);
  serving_ = serving;
  for (Watcher* const watcher : watchers_) watcher->Tell(serving);
}

Result<std::string> HealthService::ServiceOf(const grpc::ByteBuffer& request) {
  if (request.Length() > kRequestBytesMax) {
    return InvalidArgument("a health check has " + std::to_string(request.Length()) +
                           " bytes, must have at most " + std::to_string(kRequestBytesMax));
  }
  grpc::ByteBuffer bytes(request);
  proto::HealthCheckRequest parsed;
  if (!grpc::SerializationTraits<proto::HealthCheckRequest>::Deserialize(&bytes, &parsed).ok()) {
    return InvalidArgument("the message is not a health check");
  }
  return parsed.service();
}

Status HealthService::Answer(const grpc::ByteBuffer& request, grpc::ByteBuffer& response) {
  return OrOutOfMemory([&]() -> Status {
    const Result<std::string> service = ServiceOf(request);
    if (!service.ok()) return service.status();
    if (!services_.contains(*service)) return Status(Code::kNotFound, "service name unknown");
    const MutexLock lock(mutex_);
    response = MessageOf(StatusOf(serving_));
    return Status();
  });
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* call,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  reactor->Finish(ToGrpc(Answer(*request, *response)));
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HealthService::Watch(grpc::CallbackServerContext* call,
                                                                 const grpc::ByteBuffer* request) {
  std::unique_ptr<Watcher> watcher;
  const Status status = OrOutOfMemory([&]() -> Status {
    const Result<std::string> service = ServiceOf(*request);
    if (!service.ok()) return service.status();
    const Marks marks = connections_ == nullptr ? nullptr : connections_->MarksOf(call->peer());
    watcher = std::make_unique<Watcher>(*this, services_.contains(*service), marks);
    std::set<Watcher*> made = {watcher.get()};
    const MutexLock lock(mutex_);
    ATTEND_RETURN_IF_ERROR(TakePlace(marks, watcher.get()));
    watchers_.insert(made.extract(made.begin()));
    watcher->Tell(serving_);
    return Status();
  });
  if (!status.ok()) return new EndedWatch(ToGrpc(status));
  return watcher.release();
}

Status HealthService::TakePlace(const Marks& marks, Watcher* watcher) {
  if (marks == nullptr) return Status();
  const bool strange = !marks->called.load(std::memory_order_relaxed);
  const int64_t watches = marks->watches.load(std::memory_order_relaxed);
  const int64_t watches_max = strange ? kWatchesOfStrangerMax : kWatchesOfCallersMax;
  if (watches >= watches_max) {
    const std::string whose = strange ? "a connection on which no call was let in" : "a connection";
    return Status(Code::kResourceExhausted, whose + " has " + std::to_string(watches) +
                                                " watches, may have at most " +
                                                std::to_string(watches_max));
  }
  if (strange) {
    if (std::ssize(strangers_) >= kWatchesOfStrangersMax) MakeRoom();
    strangers_.push_back({watcher, marks});
  }
  marks->watches.fetch_add(1, std::memory_order_relaxed);
  return Status();
}

void HealthService::MakeRoom() {
  std::erase_if(strangers_, [](const Stranger& each) {  // a caller's by now
    return each.marks->called.load(std::memory_order_relaxed);
  });
  if (std::ssize(strangers_) < kWatchesOfStrangersMax) return;
  std::map<std::string_view, int64_t> counts;
  for (const Stranger& each : strangers_) ++counts[each.marks->peer];
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  const auto oldest = std::find_if(strangers_.begin(), strangers_.end(), [&](const Stranger& each) {
    return each.marks->peer == most->first;
  });
  oldest->watcher->End(
      grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                   "too many watches of health on connections without a caller; the "
                   "oldest was ended"));
  strangers_.erase(oldest);
}

void HealthService::Remove(Watcher* watcher) {
  const MutexLock lock(mutex_);
  watchers_.erase(watcher);
  std::erase_if(strangers_, [=](const Stranger& each) { return each.watcher == watcher; });
  const Marks& marks = watcher->marks();
  if (marks != nullptr) marks->watches.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace attend
