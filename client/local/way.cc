// SPDX-License-Identifier: Apache-2.0

#include "client/local/way.h"

#include <algorithm>
#include <future>
#include <utility>

#include "client/call/shared_call.h"

namespace attend::client {
namespace {

class HereWay final : public Way {
 public:
  HereWay(int32_t device, std::vector<std::unique_ptr<LocalCall>> calls)
      : name_(device == ATTEND_CPU ? "here, cpu" : "here, cuda:" + std::to_string(device)),
        calls_(std::move(calls)) {}

  const std::string& name() const override { return name_; }
  Result<CallTime> Run(size_t n, const LocalCall::NowNs& now) override {
    const Result<PhaseTimings> timings = calls_[n]->Run(now);
    if (!timings.ok()) return timings.status();
    return CallTime{timings->total_ns, 0, *timings};
  }
  const AttentionResult& result(size_t n) const override { return calls_[n]->result(); }

 private:
  const std::string name_;
  const std::vector<std::unique_ptr<LocalCall>> calls_;
};

class ServedWay final : public Way {
 public:
  ServedWay(const LoadOptions& options, Served served, const std::vector<AttentionCall>& calls)
      : options_(options), served_(served), calls_(calls), results_(calls.size()) {}

  Status Open() {
    name_ = std::string("served, ") + Transport();
    Result<std::unique_ptr<Client>> client = Client::Make(options_.client);
    if (!client.ok()) return client.status();
    client_ = std::move(*client);
    return served_ == Served::kMessages ? Status() : Share();
  }

  const std::string& name() const override { return name_; }
  const AttentionResult& result(size_t n) const override { return results_[n]; }

  Result<CallTime> Run(size_t n, const LocalCall::NowNs& now) override {
    const int64_t begin = now();
    Result<std::shared_ptr<const EncodedCall>> encoded = Encode(n);
    if (!encoded.ok()) return encoded.status();
    const int64_t sent = now();
    const auto answered = std::make_shared<std::promise<CallOutcome>>();
    CallOptions to;
    to.server = options_.server;
    client_->CallAsync(*encoded, {}, to, [answered](CallOutcome outcome) {
      answered->set_value(std::move(outcome));
    });
    CallOutcome outcome = answered->get_future().get();
    const int64_t end = now();
    if (!outcome.status.ok()) return outcome.status;
    results_[n] = std::move(outcome.result);
    return CallTime{end - begin, sent - begin, results_[n].timings};
  }

 private:
  const char* Transport() const {
    if (served_ == Served::kShared) return "shared memory";
    if (served_ == Served::kInPlace) return "made in shared memory";
    const int64_t bytes = PayloadBytes(calls_.front()) + AnswerBytes(calls_.front());
    return bytes >= options_.client.chunked_bytes_min ? "chunked" : "inline";
  }

  // One region per call, as a client's pool has from the second call on.
  Status Share() {
    Result<std::shared_ptr<SharedMemory>> memory =
        SharedMemory::Connect(options_.shared_memory_socket, {options_.client.token, {}});
    if (!memory.ok()) return memory.status();
    memory_ = std::move(*memory);
    for (size_t n = 0; n < calls_.size(); ++n) {
      const int64_t bytes = SharedInputBytes(calls_[n]) + SharedOutputBytes(calls_[n]);
      Result<std::shared_ptr<SharedRegion>> region = memory_->Create(std::max<int64_t>(1, bytes));
      if (!region.ok()) return region.status();
      regions_.push_back(std::move(*region));
      Result<AttentionCall> placed = Place(n);
      if (!placed.ok()) return placed.status();
      placed_.push_back(std::move(*placed));
    }
    return Status();
  }

  // Copies the call's tensors to its region.
  Result<AttentionCall> Place(size_t n) const {
    return ShareCall([&](int64_t) { return Result(regions_[n]); }, calls_[n]);
  }

  Result<std::shared_ptr<const EncodedCall>> Encode(size_t n) {
    if (served_ == Served::kShared) {
      Result<AttentionCall> placed = Place(n);
      if (!placed.ok()) return placed.status();
      placed_[n] = std::move(*placed);
    }
    Result<EncodedCall> encoded =
        EncodeCall(served_ == Served::kMessages ? calls_[n] : placed_[n], options_.transport,
                   {options_.client.chunked_bytes_min, options_.client.message_bytes_max});
    if (!encoded.ok()) return encoded.status();
    return std::make_shared<const EncodedCall>(std::move(*encoded));
  }

  const LoadOptions options_;
  const Served served_;
  const std::vector<AttentionCall>& calls_;
  std::string name_;
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
  std::vector<AttentionCall> placed_;  // the calls, with their tensors in the regions
  std::vector<AttentionResult> results_;
  std::unique_ptr<Client> client_;  // destroyed first: ends its calls before their memory goes
};

}  // namespace

Result<std::unique_ptr<Way>> MakeHere(int32_t device, const std::vector<AttentionCall>& calls) {
  std::vector<std::unique_ptr<LocalCall>> locals;
  for (const AttentionCall& call : calls) {
    Result<std::unique_ptr<LocalCall>> local = LocalCall::Make(device, call);
    if (!local.ok()) return local.status();
    locals.push_back(std::move(*local));
  }
  return std::unique_ptr<Way>(std::make_unique<HereWay>(device, std::move(locals)));
}

Result<std::unique_ptr<Way>> MakeServed(const LoadOptions& options, Served served,
                                        const std::vector<AttentionCall>& calls) {
  auto way = std::make_unique<ServedWay>(options, served, calls);
  ATTEND_RETURN_IF_ERROR(way->Open());
  return std::unique_ptr<Way>(std::move(way));
}

}  // namespace attend::client
