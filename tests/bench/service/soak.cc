// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/soak.h"

#include <chrono>
#include <random>
#include <utility>

#include "tests/bench/service/server_process.h"

namespace attend::bench {
namespace {

using std::chrono::microseconds;

constexpr int kCallers = 4;
constexpr int kConnections = 4;
constexpr int kBurst = 16;
// Every so many answers one is judged in full.
constexpr uint64_t kJudgedEvery = 64;

void Pause(std::mt19937_64& random, int64_t us_max) {
  std::this_thread::sleep_for(microseconds(random() % static_cast<uint64_t>(us_max)));
}

bool Expected(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
    case Code::kCancelled:
    case Code::kDeadlineExceeded:
    case Code::kResourceExhausted:  // the killed clients' uploads hold memory for a moment
      return true;
    default:
      return false;
  }
}

}  // namespace

SoakLoad::SoakLoad(const std::string& address, std::vector<std::shared_ptr<Work>> works,
                   uint64_t seed)
    : address_(address), works_(std::move(works)) {
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

void SoakLoad::Count(const Status& status) {
  ++(status.ok() ? answered_ : ended_otherwise_);
  if (!Expected(status)) Fault(status.ToString());
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

void SoakLoad::KilledClients(uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop_) {
    const Result<std::unique_ptr<ServerProcess>> client =
        ServerProcess::Start(ServeCommand("abandon", {address_}));
    if (!client.ok()) {
      Fault(client.status().ToString());
      return;
    }
    Pause(random, 50000);
    ++killed_clients_;
  }
}

}  // namespace attend::bench
