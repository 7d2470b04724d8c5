// SPDX-License-Identifier: Apache-2.0
//
// Each ready handshake has a turn: its peer's next one, or the current one if that is later. So a
// peer's handshakes are one turn apart, and those of different peers alternate. Steps are posted
// one by one, so socket events and timers are served between them.

#include "server/tls/tls_handshakes.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "server/util/assign.h"

namespace attend {

// Deletes itself.
class TlsHandshakes::Handshake final : public Loop::Task,
                                       private Loop::Watcher,
                                       private Loop::Timer {
 public:
  Handshake(TlsHandshakes& all, std::string peer, std::unique_ptr<TlsChannel> channel, Done done)
      : all_(all),
        peer_name_(std::move(peer)),
        channel_(std::move(channel)),
        done_(std::move(done)) {}

  void Run() override {
    if (finished_) {
      delete this;
    } else {
      Start();
    }
  }
  void Finish(bool established) {
    if (std::exchange(finished_, true)) return;
    all_.loop_->Clear(*this);
    if (watched_) all_.loop_->Unwatch(channel_->socket());
    StopBeingReady();
    all_.handshakes_.erase(this);
    if (peer_ != all_.peers_.end() && --peer_->second.handshakes == 0) all_.peers_.erase(peer_);
    done_(std::move(channel_), established);
    all_.loop_->Post(*this);  // deletes it, after any event of this turn that could refer to it
  }
  // Called on its turn.
  void TakeStep() {
    StopBeingReady();
    if (!std::exchange(spoke_, true) && !all_.speaks_tls_(channel_->socket())) return Finish(false);
    const TlsChannel::Step step = channel_->Handshake();
    if (step == TlsChannel::Step::kDone) return Finish(true);
    if (step == TlsChannel::Step::kFailed) return Finish(false);
    const bool writes = step == TlsChannel::Step::kWantsWrite;
    all_.loop_->Rewatch(channel_->socket(), writes ? EPOLLOUT : EPOLLIN, *this);
  }

 private:
  ~Handshake() = default;

  void Start() try {
    peer_ = all_.peers_.end();
    ready_ = all_.ready_.end();
    all_.handshakes_.insert(this);
    peer_ = all_.peers_.try_emplace(peer_name_).first;
    ++peer_->second.handshakes;
    all_.loop_->Set(*this, all_.clock_.Now() + all_.timeout_);
    watched_ = all_.loop_->Watch(channel_->socket(), EPOLLIN, *this).ok();
    if (!watched_) Finish(false);
  } catch (const std::bad_alloc&) {
    Finish(false);
  }
  void OnEvents(uint32_t events) override try {
    if (finished_) return;
    // The client has gone, or the connection was ended: no turn is needed.
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) return Finish(false);
    if (ready_ != all_.ready_.end()) return;
    const uint64_t turn = std::max(peer_->second.next_turn, all_.turns_);
    ready_ = all_.ready_.emplace(turn, this);
    peer_->second.next_turn = turn + 1;
    all_.loop_->Rewatch(channel_->socket(), 0, *this);
    all_.loop_->Post(all_.turn_);
  } catch (const std::bad_alloc&) {
    Finish(false);
  }
  void OnTime() override {
    channel_->TimeOut();
    Finish(false);
  }
  void StopBeingReady() {
    if (ready_ != all_.ready_.end()) all_.ready_.erase(std::exchange(ready_, all_.ready_.end()));
  }

  TlsHandshakes& all_;
  const std::string peer_name_;
  std::unique_ptr<TlsChannel> channel_;
  const Done done_;
  // Set by Start.
  std::map<std::string, Peer>::iterator peer_;           // the end: none, for lack of memory
  std::multimap<uint64_t, Handshake*>::iterator ready_;  // the end: not ready
  bool watched_ = false;
  bool spoke_ = false;
  bool finished_ = false;
};

Result<std::unique_ptr<TlsHandshakes>> TlsHandshakes::Start(
    Duration timeout, const Clock& clock, std::function<bool(int socket)> speaks_tls) {
  std::unique_ptr<TlsHandshakes> made(new TlsHandshakes(timeout, clock, std::move(speaks_tls)));
  ATTEND_RETURN_IF_ERROR(Assign(made->loop_, Loop::Start("attend-tls", clock)));
  return made;
}

TlsHandshakes::~TlsHandshakes() {
  if (loop_ == nullptr) return;
  loop_->RunAndWait([this] {
    while (!handshakes_.empty()) (*handshakes_.begin())->Finish(false);
  });
  loop_.reset();
}

void TlsHandshakes::Begin(std::string peer, std::unique_ptr<TlsChannel> channel, Done done) {
  loop_->Post(*new Handshake(*this, std::move(peer), std::move(channel), std::move(done)));
}

void TlsHandshakes::TakeTurn() {
  if (ready_.empty()) return;
  turns_ = ready_.begin()->first;
  ready_.begin()->second->TakeStep();
  // Posted, so that events come first: another peer's client may have become ready.
  if (!ready_.empty()) loop_->Post(turn_);
}

}  // namespace attend
