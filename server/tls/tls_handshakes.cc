// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_handshakes.h"

#include <sys/epoll.h>

#include <cstdint>
#include <new>
#include <utility>

namespace attend {

// One connection's. It deletes itself.
class TlsHandshakes::One final : public Loop::Task, private Loop::Watcher, private Loop::Timer {
 public:
  One(TlsHandshakes& all, std::unique_ptr<TlsChannel> channel, Done done)
      : all_(all), channel_(std::move(channel)), done_(std::move(done)) {}

  void Run() override {
    if (over_) {
      delete this;
    } else {
      Start();
    }
  }
  void End(bool shaken) {
    if (std::exchange(over_, true)) return;
    all_.loop_->Clear(*this);
    if (watched_) all_.loop_->Unwatch(channel_->socket());
    (before_ == nullptr ? all_.first_ : before_->after_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
    done_(std::move(channel_), shaken);
    all_.loop_->Post(*this);  // to delete it, once no event of this turn can meet it
  }

 private:
  ~One() = default;

  void Start() {
    after_ = std::exchange(all_.first_, this);
    if (after_ != nullptr) after_->before_ = this;
    const Status watched = all_.loop_->Watch(channel_->socket(), EPOLLIN, *this);
    if (!watched.ok()) return End(false);
    watched_ = true;
    try {
      all_.loop_->Set(*this, all_.clock_.Now() + all_.timeout_);
    } catch (const std::bad_alloc&) {
      End(false);
    }
  }
  void OnEvents(uint32_t /*events*/) override {
    if (over_) return;
    const TlsChannel::Step step = channel_->Handshake();
    if (step == TlsChannel::Step::kDone) return End(true);
    if (step == TlsChannel::Step::kFailed) return End(false);
    const bool writes = step == TlsChannel::Step::kWrites;
    if (writes == std::exchange(writes_, writes)) return;
    all_.loop_->Rewatch(channel_->socket(), writes ? EPOLLOUT : EPOLLIN, *this);
  }
  void OnTime() override {
    channel_->GiveUp();
    End(false);
  }

  TlsHandshakes& all_;
  std::unique_ptr<TlsChannel> channel_;
  const Done done_;
  One* before_ = nullptr;
  One* after_ = nullptr;
  bool watched_ = false;
  bool writes_ = false;  // it waits until it can write
  bool over_ = false;

  friend class TlsHandshakes;
};

class TlsHandshakes::EndAll final : public Loop::Task {
 public:
  explicit EndAll(TlsHandshakes& all) : all_(all) {}
  void Run() override {
    while (all_.first_ != nullptr) all_.first_->End(false);
    ended_.store(true);
    ended_.notify_all();
  }
  void Wait() { ended_.wait(false); }

 private:
  TlsHandshakes& all_;
  std::atomic<bool> ended_{false};
};

Result<std::unique_ptr<TlsHandshakes>> TlsHandshakes::Start(Duration timeout, const Clock& clock) {
  std::unique_ptr<TlsHandshakes> made(new TlsHandshakes(timeout, clock));
  Result<std::unique_ptr<Loop>> loop = Loop::Start("attend-tls", clock);
  if (!loop.ok()) return loop.status();
  made->loop_ = std::move(*loop);
  return made;
}

TlsHandshakes::~TlsHandshakes() {
  if (loop_ == nullptr) return;
  EndAll end(*this);
  loop_->Post(end);
  end.Wait();
  loop_.reset();
}

void TlsHandshakes::Begin(std::unique_ptr<TlsChannel> channel, Done done) {
  loop_->Post(*new One(*this, std::move(channel), std::move(done)));
}

}  // namespace attend
