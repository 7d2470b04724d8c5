// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/health_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <new>
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
grpc::ByteBuffer Answer(ServingStatus status) {
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
  Watcher(HealthService& service, bool known) : service_(service), known_(known) {}

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
    bytes_ = Answer(told_);
    StartWrite(&bytes_);
  }

  HealthService& service_;
  const bool known_;
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

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* call,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  grpc::Status status;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const Result<std::string> service = ServiceOf(*request);
    if (!service.ok()) {
      status = ToGrpc(service.status());
    } else if (!services_.contains(*service)) {
      status = grpc::Status(grpc::StatusCode::NOT_FOUND, "service name unknown");
    } else {
      const MutexLock lock(mutex_);
      *response = Answer(StatusOf(serving_));
    }
  } catch (const std::bad_alloc&) {
    status = NoMemory();
  }
  reactor->Finish(status);
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HealthService::Watch(grpc::CallbackServerContext* call,
                                                                 const grpc::ByteBuffer* request) {
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const Result<std::string> service = ServiceOf(*request);
    if (!service.ok()) return new EndedWatch(ToGrpc(service.status()));
    const Marks marks = connections_ == nullptr ? nullptr : connections_->MarksOf(call->peer());
    auto watcher = std::make_unique<Watcher>(*this, services_.contains(*service));
    std::set<Watcher*>::node_type place;
    {
      std::set<Watcher*> made = {watcher.get()};
      place = made.extract(made.begin());
    }
    const MutexLock lock(mutex_);
    if (const Status taken = TakePlace(marks, watcher.get()); !taken.ok()) {
      return new EndedWatch(ToGrpc(taken));
    }
    watchers_.insert(std::move(place));
    watcher->Tell(serving_);
    return watcher.release();
  } catch (const std::bad_alloc&) {
    return new EndedWatch(NoMemory());
  }
}

Status HealthService::TakePlace(const Marks& marks, Watcher* watcher) {
  if (marks == nullptr || marks->called.load(std::memory_order_relaxed)) return Status();
  const int64_t watches = marks->watches.load(std::memory_order_relaxed);
  if (watches >= kWatchesOfConnectionMax) {
    return Status(Code::kResourceExhausted,
                  "a connection on which no call was let in has " + std::to_string(watches) +
                      " watches, may have at most " + std::to_string(kWatchesOfConnectionMax));
  }
  for (auto each = strangers_.begin();
       each != strangers_.end() && std::ssize(strangers_) >= kWatchesOfStrangersMax;) {
    const auto oldest = each++;
    if (!oldest->marks->called.load(std::memory_order_relaxed)) continue;
    GiveBack(oldest);  // a caller's by now
  }
  if (std::ssize(strangers_) >= kWatchesOfStrangersMax) MakeRoom();
  strangers_.push_back({watcher, marks});
  marks->watches.fetch_add(1, std::memory_order_relaxed);
  return Status();
}

void HealthService::MakeRoom() {
  std::map<std::string_view, int64_t> counts;
  for (const Stranger& each : strangers_) ++counts[each.marks->peer];
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  const auto oldest = std::find_if(strangers_.begin(), strangers_.end(), [&](const Stranger& each) {
    return each.marks->peer == most->first;
  });
  oldest->watcher->End(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                    "others who say not who they are watch, too"));
  GiveBack(oldest);
}

void HealthService::GiveBack(std::list<Stranger>::iterator stranger) {
  stranger->marks->watches.fetch_sub(1, std::memory_order_relaxed);
  strangers_.erase(stranger);
}

void HealthService::Remove(Watcher* watcher) {
  const MutexLock lock(mutex_);
  watchers_.erase(watcher);
  const auto stranger = std::find_if(strangers_.begin(), strangers_.end(),
                                     [=](const Stranger& each) { return each.watcher == watcher; });
  if (stranger != strangers_.end()) GiveBack(stranger);
}

}  // namespace attend
