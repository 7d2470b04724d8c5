// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/engine_slots.h"

#include <spdlog/sinks/null_sink.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <semaphore>
#include <utility>
#include <vector>

#include "server/app/config.h"
#include "server/app/devices.h"
#include "server/app/options.h"
#include "server/engine/engine.h"

namespace attend::bench {
namespace {

// Makes one request after another with the same memory.
class EngineSlot final : public Responder {
 public:
  // `admission` is that of the engine.
  EngineSlot(Engine& engine, uint64_t id, const Work& work, Admission admission)
      : engine_(engine),
        id_(id),
        admission_(std::move(admission)),
        attention_(work.owned().attention) {
    const HostSpan& from = work.owned().input;
    auto* const in = static_cast<char*>(admission_.input.data());
    std::memcpy(in, from.data, static_cast<size_t>(from.bytes));
    for (ConstTensorView* view : {&attention_.q, &attention_.k, &attention_.v}) {
      view->data = in + (static_cast<const char*>(view->data) - static_cast<char*>(from.data));
    }
    attention_.o.data = admission_.output.data();
    attention_.problem.return_lse = false;  // as in the calls of servers
    attention_.lse = nullptr;
  }

  Result<std::string> Run() {
    auto request = std::make_unique<Request>();
    request->id = id_;
    request->attention = attention_;
    request->input_spans = {{admission_.input.data(), admission_.input.bytes()}};
    request->output_spans = {{admission_.output.data(), admission_.output.bytes()}};
    request->received = std::chrono::steady_clock::now();
    request->responder = this;
    ATTEND_RETURN_IF_ERROR(engine_.Submit(request));
    ended_.acquire();
    const std::unique_ptr<Request> answer = std::move(answer_);
    if (!answer->status.ok()) return answer->status;
    return answer->device_name;
  }
  void Finish(std::unique_ptr<Request> request) override {
    answer_ = std::move(request);
    ended_.release();
  }
  char* o() const { return static_cast<char*>(admission_.output.data()); }

 private:
  Engine& engine_;
  const uint64_t id_;
  const Admission admission_;
  Attention attention_;
  std::unique_ptr<Request> answer_;
  std::binary_semaphore ended_{0};
};

// An engine with everything that must outlive its threads.
struct Host {
  SteadyClock clock;
  Metrics metrics{"bench"};
  std::unique_ptr<Engine> engine;
  std::vector<std::unique_ptr<EngineSlot>> slots;
  ~Host() {
    if (engine != nullptr) engine->Stop();
  }
};

}  // namespace

Result<std::unique_ptr<AnswerSlots>> MakeEngineSlots(const std::string& devices, int count,
                                                     const Work& work, int slots) {
  const int64_t input_bytes = work.owned().input.bytes;
  const int64_t output_bytes = work.output_bytes();
  Config config;
  config.device = devices;
  config.memory_budget_bytes =
      slots * (HostPool::BlockBytes(input_bytes) + HostPool::BlockBytes(output_bytes));
  Logger silent({}, std::make_shared<spdlog::sinks::null_sink_mt>());
  Result<Devices> opened = MakeBackends(config, silent);
  if (!opened.ok()) return opened.status();
  const bool gpu = opened->backends.front()->info().kind == DeviceKind::kCuda;
  auto host = std::make_shared<Host>();
  Result<std::unique_ptr<Engine>> engine = Engine::Make(
      std::move(opened->backends), MakeEngineOptions(config, gpu), host->metrics, host->clock);
  if (!engine.ok()) return engine.status();
  host->engine = std::move(*engine);
  Problem problem = work.owned().attention.problem;
  problem.return_lse = false;
  std::vector<Slot> made;
  for (int i = 0; i < slots; ++i) {
    Result<Admission> admission = host->engine->Admit(problem, "", input_bytes, output_bytes, 0);
    if (!admission.ok()) return admission.status();
    EngineSlot* const slot =
        host->slots
            .emplace_back(std::make_unique<EngineSlot>(*host->engine, static_cast<uint64_t>(i + 1),
                                                       work, std::move(*admission)))
            .get();
    made.push_back({slot->o(), [host, slot] { return slot->Run(); }});
  }
  return std::make_unique<AnswerSlots>(work, std::move(made), count);
}

}  // namespace attend::bench
