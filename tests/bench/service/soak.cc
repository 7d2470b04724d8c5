// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/soak.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <random>
#include <string_view>
#include <utility>

#include "client/call/shared_call.h"
#include "client/memory/shared_memory.h"
#include "tests/bench/service/server_process.h"

namespace attend::bench {
namespace {

using std::chrono::microseconds;

constexpr int kCallers = 4;
constexpr int kConnections = 4;
constexpr int kBurst = 16;
// Every so many answers one is judged in full.
constexpr uint64_t kJudgedEvery = 64;
constexpr int kSharers = 2;
constexpr int kDecoders = 2;
constexpr int kRegionsPerConnection = 16;
// Calls of one region at once, and how often.
constexpr uint64_t kRegionCallsMost = 4;
constexpr uint64_t kRegionRoundsMost = 8;
constexpr std::initializer_list<Code> kNone = {};
constexpr std::initializer_list<Code> kNotThere = {Code::kNotFound};
// What stands where an answer goes, and nowhere in it: NaNs.
constexpr int kUnwritten = 0xff;
// Before another try where the server has no memory for a region.
constexpr int64_t kRestUs = 20000;

void Pause(std::mt19937_64& random, int64_t us_max) {
  std::this_thread::sleep_for(microseconds(random() % static_cast<uint64_t>(us_max)));
}

bool Expected(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
    case Code::kCancelled:
    case Code::kDeadlineExceeded:
    case Code::kResourceExhausted:  // the killed clients hold memory for a moment
      return true;
    default:
      return false;
  }
}

// So many calls of the work in one region: all read the same inputs there, and each has a place of
// its own for its answer.
Result<std::vector<client::AttentionCall>> CallsInRegion(client::SharedMemory& memory,
                                                         const Work& work, uint64_t count) {
  client::AttentionCall call = work.call();
  const int64_t input_bytes = client::SharedInputBytes(call);
  const int64_t place_bytes = client::SharedOutputBytes(call);
  const Result<std::shared_ptr<client::SharedRegion>> region =
      memory.Create(input_bytes + static_cast<int64_t>(count) * place_bytes);
  if (!region.ok()) return region.status();
  ATTEND_RETURN_IF_ERROR(client::ShareInputs({*region, 0}, &call));
  std::vector<client::AttentionCall> calls;
  client::SharedPlace place{*region, input_bytes};
  for (uint64_t i = 0; i < count; ++i, place.offset += place_bytes) {
    calls.push_back(call);
    calls.back().outputs = client::ShareOutputs(place, call);
  }
  return calls;
}

}  // namespace

SoakLoad::SoakLoad(const std::string& address, const std::string& socket,
                   std::vector<std::shared_ptr<Work>> works, uint64_t seed)
    : address_(address), socket_(socket), works_(std::move(works)) {
  client::ClientOptions options;
  options.server = address;
  options.connections = kConnections;
  options.retry.attempts_max = 1;
  Result<std::unique_ptr<Client>> client = Client::Make(options);
  if (!client.ok()) {
    Fault(client.status().ToString());
    return;
  }
  client_ = std::move(*client);
  for (int i = 0; i < kCallers; ++i) {
    threads_.emplace_back([this, seed, i] { Calls(seed + static_cast<uint64_t>(i)); });
  }
  threads_.emplace_back([this, seed] { Cancels(seed + kCallers); });
  threads_.emplace_back([this, seed] { Streams(seed + kCallers + 1); });
  threads_.emplace_back([this, seed] { KilledClients(seed + kCallers + 2); });
  for (int i = 0; i < kSharers; ++i) {
    threads_.emplace_back(
        [this, seed, i] { Regions(seed + kCallers + 3 + static_cast<uint64_t>(i)); });
  }
  for (int i = 0; i < kDecoders; ++i) {
    threads_.emplace_back(
        [this, seed, i] { Sessions(seed + kCallers + 3 + kSharers + static_cast<uint64_t>(i)); });
  }
}

SoakLoad::~SoakLoad() { Stop(); }

void SoakLoad::Stop() {
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  if (client_ != nullptr) client_->Close();
}

std::string SoakLoad::fault() const {
  const std::lock_guard lock(mutex_);
  return fault_;
}

void SoakLoad::Fault(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (fault_.empty()) fault_ = text;
}

void SoakLoad::Count(const Status& status, std::initializer_list<Code> also) {
  ++(status.ok() ? answered_ : ended_otherwise_);
  if (Expected(status) || std::find(also.begin(), also.end(), status.code()) != also.end()) return;
  Fault(status.ToString());
}

// One after another; now and then with a deadline that passes on the way.
void SoakLoad::Calls(uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop_) {
    const Work& work = Pick(random());
    client::CallOptions options;
    options.transport =
        random() % 4 == 0 ? client::CallTransport::kChunked : client::CallTransport::kInline;
    if (random() % 8 == 0) options.timeout = microseconds(1 + random() % 5000);
    const Result<client::AttentionResult> answer = client_->Call(work.call(), options);
    Count(answer.ok() ? Status() : answer.status());
    if (!answer.ok() || random() % kJudgedEvery != 0) continue;
    const std::string wrong = answer->o.bytes == work.output_bytes()
                                  ? work.CheckOutput(answer->o.data.get())
                                  : "O has a wrong size";
    if (!wrong.empty()) Fault(wrong);
  }
}

// Bursts of calls, each cancelled at some moment of its life.
void SoakLoad::Cancels(uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop_) {
    std::vector<client::CallHandle> handles;
    for (int i = 0; i < kBurst; ++i) {
      client::CallOptions options;
      options.transport =
          random() % 2 == 0 ? client::CallTransport::kChunked : client::CallTransport::kInline;
      options.payload = client::Payload::kDiscard;
      handles.push_back(client_->CallAsync(
          Pick(random()).call(), options,
          [this](const client::CallOutcome& outcome) { Count(outcome.status); }));
    }
    for (client::CallHandle& handle : handles) {
      Pause(random, 1000);
      handle.Cancel();
    }
  }
}

// Streams that end well, and streams that are closed with requests unanswered.
void SoakLoad::Streams(uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop_) {
    const std::unique_ptr<client::Stream> stream = client_->OpenStream();
    for (int i = 0; i < kBurst; ++i) {
      stream->Send(Pick(random()).call(),
                   [this](const client::StreamAnswer& answer) { Count(answer.status); });
    }
    if (random() % 2 == 0) {
      const Status status = stream->Finish();
      if (!Expected(status)) Fault(status.ToString());
    } else {
      Pause(random, 5000);
      stream->Close();
    }
  }
}

// One thread's use of shared memory: connections with some regions each.
class SoakLoad::Sharer {
 public:
  Sharer(SoakLoad& load, uint64_t seed) : load_(load), random_(seed) {}

  void UseConnection();

 private:
  // What becomes of a region's calls while they are under way.
  enum class Parting { kNone, kCancel, kRelease };
  using Calls = std::vector<client::AttentionCall>;

  void UseRegion(client::SharedMemory& memory);
  // All at once. True: all were answered, so that their places can be used again.
  bool CallAll(client::SharedMemory& memory, const Work& work, const Calls& calls, Parting parting);
  void Release(client::SharedMemory& memory, const Calls& calls);
  // The same bits as a right answer's, or judged as that was. Empty: right.
  std::string Judge(const Work& work, const client::HostTensor& o,
                    const client::SharedPlace& place);

  SoakLoad& load_;
  std::mt19937_64 random_;
  std::map<const Work*, std::string> right_;  // the first answer of each that was
};

void SoakLoad::Sharer::UseConnection() {
  const Result<std::shared_ptr<client::SharedMemory>> memory =
      client::SharedMemory::Connect({load_.socket_});
  if (!memory.ok()) {
    load_.Fault(memory.status().ToString());
    Pause(random_, kRestUs);
    return;
  }
  for (int i = 0; i < kRegionsPerConnection && !load_.stop_; ++i) UseRegion(**memory);
}

// Some rounds of calls; then it goes, with the last ones answered, cancelled or under way.
void SoakLoad::Sharer::UseRegion(client::SharedMemory& memory) {
  const Work& work = load_.Pick(random_());
  const Result<Calls> calls = CallsInRegion(memory, work, 1 + random_() % kRegionCallsMost);
  if (!calls.ok()) {
    load_.Count(calls.status());
    Pause(random_, kRestUs);
    return;
  }
  ++load_.regions_;
  for (uint64_t rounds = 1 + random_() % kRegionRoundsMost; rounds > 0; --rounds) {
    if (!CallAll(memory, work, *calls, Parting::kNone)) return;
  }
  switch (random_() % 4) {
    case 0:
      CallAll(memory, work, *calls, Parting::kCancel);
      return;
    case 1:
      CallAll(memory, work, *calls, Parting::kRelease);
      return;
    case 2:
      Release(memory, *calls);
      return;
    default:  // the last reference releases it
      return;
  }
}

bool SoakLoad::Sharer::CallAll(client::SharedMemory& memory, const Work& work, const Calls& calls,
                               Parting parting) {
  std::vector<client::CallHandle> handles;
  std::vector<std::future<client::CallOutcome>> ends;
  for (const client::AttentionCall& call : calls) {
    std::memset(call.outputs.o->data(), kUnwritten, static_cast<size_t>(work.output_bytes()));
    const auto end = std::make_shared<std::promise<client::CallOutcome>>();
    ends.push_back(end->get_future());
    handles.push_back(load_.client_->CallAsync(
        call, {}, [end](client::CallOutcome outcome) { end->set_value(std::move(outcome)); }));
  }
  if (parting != Parting::kNone) Pause(random_, 2000);
  if (parting == Parting::kRelease) Release(memory, calls);
  if (parting == Parting::kCancel) {
    for (client::CallHandle& handle : handles) handle.Cancel();
  }
  bool all = true;
  for (size_t i = 0; i < calls.size(); ++i) {
    const client::CallOutcome outcome = ends[i].get();
    // A call over a region that was released meanwhile may not find it.
    load_.Count(outcome.status, parting == Parting::kRelease ? kNotThere : kNone);
    all = all && outcome.status.ok();
    if (!outcome.status.ok()) continue;
    const std::string wrong = Judge(work, outcome.result.o, *calls[i].outputs.o);
    if (!wrong.empty()) load_.Fault("in shared memory: " + wrong);
    if (wrong.empty()) ++load_.region_answers_;
  }
  return all;
}

void SoakLoad::Sharer::Release(client::SharedMemory& memory, const Calls& calls) {
  const Status status = memory.Release(*calls.front().outputs.o->region);
  if (!status.ok()) load_.Fault(status.ToString());
}

std::string SoakLoad::Sharer::Judge(const Work& work, const client::HostTensor& o,
                                    const client::SharedPlace& place) {
  if (o.bytes != work.output_bytes()) return "O has a wrong size";
  if (o.data.get() != place.data()) return "O is not in its place";
  const std::string_view bytes(reinterpret_cast<const char*>(o.data.get()),
                               static_cast<size_t>(o.bytes));
  std::string& right = right_[&work];
  if (bytes == right) return "";
  // The check takes samples of large answers.
  if (bytes.find(std::string(16, static_cast<char>(kUnwritten))) != std::string_view::npos) {
    return "a part of O was not written";
  }
  std::string wrong = work.CheckOutput(o.data.get());
  if (wrong.empty() && right.empty()) right = bytes;
  return wrong;
}

void SoakLoad::Regions(uint64_t seed) {
  Sharer sharer(*this, seed);
  while (!stop_) sharer.UseConnection();
}

void SoakLoad::KilledClients(uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop_) {
    const Result<std::unique_ptr<ServerProcess>> client =
        ServerProcess::Start(ServeCommand("abandon", {address_, socket_}));
    if (!client.ok()) {
      Fault(client.status().ToString());
      return;
    }
    Pause(random, 50000);
    ++killed_clients_;
  }
}

}  // namespace attend::bench
