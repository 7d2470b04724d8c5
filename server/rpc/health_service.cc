// SPDX-License-Identifier: Apache-2.0
//
// A watcher remembers the last status told and the current one; a change while a write is in
// progress only updates the latter. Watches of unauthenticated connections are also in a list,
// oldest first, from which MakeRoom ends the oldest one of the peer that has most.

#include "server/rpc/health_service.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "grpc/health/v1/health.pb.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"
#include "server/rpc/service_call.h"

namespace attend {
namespace {

namespace health = grpc::health::v1;
using health::HealthCheckResponse;
using ServingStatus = HealthCheckResponse::ServingStatus;

// Longer than any service name.
constexpr size_t kHealthBytesMax = 4096;

// The encoded status. Two bytes, so it allocates nothing.
std::string MessageOf(ServingStatus status) {
  constexpr char kField = 0x08;
  return {kField, static_cast<char>(status)};
}

ServingStatus StatusOf(bool serving) {
  return serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

}  // namespace

// Sends each change to its client, skipping intermediate ones if the client reads slowly. Except
// for Begin and the transport's callbacks, used with the service's mutex held.
class HealthService::Watcher final : public CallHandler {
 public:
  Watcher(HealthService& service, ServerCall& call) : service_(service), wire_(call) {}

  void Begin() { wire_.Read(); }
  void Tell(bool serving) {
    now_ = known_ ? StatusOf(serving) : HealthCheckResponse::SERVICE_UNKNOWN;
    Write();
  }
  void End(const Status& status) {
    if (std::exchange(ended_, true)) return;
    wire_.End(status);
  }

 private:
  friend class HealthService;

  void OnMessage(InMessage message) override {
    const Status status = OrOutOfMemory([&] { return service_.Begin(*this, message.Text()); });
    const MutexLock lock(service_.mutex_);
    if (!status.ok()) End(status);
  }
  void OnHalfClose() override {
    const MutexLock lock(service_.mutex_);
    End(InvalidArgument("the call has no message"));
  }
  void OnWritten(bool ok) override {
    const MutexLock lock(service_.mutex_);
    writing_ = false;
    if (!ok) return End(Cancelled());
    Write();
  }
  void OnCancel() override {
    const MutexLock lock(service_.mutex_);
    End(Cancelled());
  }
  void OnDone() override {
    service_.Remove(this);
    delete this;
  }
  void Write() {
    if (ended_ || writing_ || now_ == told_) return;
    writing_ = true;
    told_ = now_;
    wire_.Write(OutMessage::Of(MessageOf(told_)));
  }
  static Status Cancelled() { return Status(Code::kCancelled, "the call was cancelled"); }

  HealthService& service_;
  const WireCall wire_;
  bool known_ = false;  // the watched service exists
  Marks marks_;         // of its connection; may be null
  ServingStatus now_ = HealthCheckResponse::UNKNOWN;
  ServingStatus told_ = HealthCheckResponse::UNKNOWN;
  bool writing_ = false;
  bool ended_ = false;
};

class HealthService::CheckCall final : public SmallCall {
 public:
  CheckCall(ServerCall& call, HealthService& service) : SmallCall(call), service_(service) {}

 private:
  void Take() override { Finish(service_.Check(request_, response_)); }

  HealthService& service_;
};

HealthService::HealthService(const std::vector<std::string>& services, bool bounded)
    : bounded_(bounded), services_([&services] {
        std::set<std::string> all(services.begin(), services.end());
        all.insert("");
        return all;
      }()) {}

void HealthService::SetServing(bool serving) {
  const MutexLock lock(mutex_);
  serving_ = serving;
  for (Watcher* const watcher : watchers_) watcher->Tell(serving);
}

Result<std::string> HealthService::ServiceOf(const std::string& request) {
  if (request.size() > kHealthBytesMax) {
    return InvalidArgument("a health check has " + std::to_string(request.size()) +
                           " bytes, must have at most " + std::to_string(kHealthBytesMax));
  }
  health::HealthCheckRequest parsed;
  if (!parsed.ParseFromString(request)) return InvalidArgument("the message is not a health check");
  return parsed.service();
}

Status HealthService::Check(const std::string& request, std::string& response) {
  return OrOutOfMemory([&]() -> Status {
    const Result<std::string> service = ServiceOf(request);
    if (!service.ok()) return service.status();
    if (!services_.contains(*service)) return Status(Code::kNotFound, "service name unknown");
    const MutexLock lock(mutex_);
    response = MessageOf(StatusOf(serving_));
    return Status();
  });
}

Status HealthService::Begin(Watcher& watcher, const std::string& request) {
  const Result<std::string> service = ServiceOf(request);
  if (!service.ok()) return service.status();
  const ConnectionHolds::Ref& holds = watcher.wire_.peer().holds;
  const Marks marks = bounded_ && holds ? holds->marks() : nullptr;
  std::set<Watcher*> made = {&watcher};
  const MutexLock lock(mutex_);
  if (watcher.ended_) return Status();  // cancelled in the meantime
  ATTEND_RETURN_IF_ERROR(TakePlace(marks, &watcher));
  watchers_.insert(made.extract(made.begin()));
  watcher.known_ = services_.contains(*service);
  watcher.marks_ = marks;
  watcher.Tell(serving_);
  return Status();
}

void HealthService::AddTo(CallTable& table) {
  const std::string service = "/grpc.health.v1.Health";
  table.Add(service + "/Check", CallTable::kOpen,
            [this](ServerCall& call) { return SmallCall::Begin<CheckCall>(call, *this); });
  table.Add(service + "/Watch", CallTable::kOpen, [this](ServerCall& call) {
    auto* const watcher = new Watcher(*this, call);
    watcher->Begin();
    return watcher;
  });
}

Status HealthService::TakePlace(const Marks& marks, Watcher* watcher) {
  if (marks == nullptr) return Status();
  const bool strange = !marks->called.load(std::memory_order_relaxed);
  const int64_t watches = marks->watches.load(std::memory_order_relaxed);
  const int64_t watches_max = strange ? kWatchesOfStrangerMax : kWatchesOfCallersMax;
  if (watches >= watches_max) {
    const std::string whose = strange ? "a connection without an accepted call" : "a connection";
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
  std::erase_if(strangers_, [](const Stranger& each) {  // has an accepted call by now
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
  oldest->watcher->End(ResourceExhausted(
      "too many health watches on connections without an accepted call; this one was ended"));
  strangers_.erase(oldest);
}

void HealthService::Remove(Watcher* watcher) {
  const MutexLock lock(mutex_);
  watchers_.erase(watcher);
  std::erase_if(strangers_, [=](const Stranger& each) { return each.watcher == watcher; });
  const Marks& marks = watcher->marks_;
  if (marks != nullptr) marks->watches.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace attend
