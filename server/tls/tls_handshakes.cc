// SPDX-License-Identifier: Apache-2.0
//
// Round robin over peers: a peer is in turns_ while it has a ready handshake, and each turn
// performs one step of its first one. Turns are posted one by one, so socket events and timers are
// served between them. Invariant: a Handshake is in exactly one of its peer's lists, or in its own
// before it starts, so moving it cannot fail.

#include "server/tls/tls_handshakes.h"

#include <sys/epoll.h>

#include <cstdint>
#include <new>
#include <utility>

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
    if (peer_ != nullptr) LeavePeer();
    done_(std::move(channel_), established);
    all_.loop_->Post(*this);  // deletes it, after any event of this turn that could refer to it
  }
  // Called on its peer's turn, for the first ready handshake.
  void TakeStep() {
    StopBeingReady();
    const TlsChannel::Step step = channel_->Handshake();
    if (step == TlsChannel::Step::kDone) return Finish(true);
    if (step == TlsChannel::Step::kFailed) return Finish(false);
    const bool writes = step == TlsChannel::Step::kWantsWrite;
    all_.loop_->Rewatch(channel_->socket(), writes ? EPOLLOUT : EPOLLIN, *this);
  }

 private:
  ~Handshake() = default;

  void Start() try {
    peer_ = &all_.peers_[peer_name_];
    peer_->waiting.splice(peer_->waiting.end(), link_);
    all_.loop_->Set(*this, all_.clock_.Now() + all_.timeout_);
    watched_ = all_.loop_->Watch(channel_->socket(), EPOLLIN, *this).ok();
    if (!watched_) Finish(false);
  } catch (const std::bad_alloc&) {
    Finish(false);
  }
  void OnEvents(uint32_t events) override {
    if (finished_) return;
    // The client has gone, or the connection was ended: no turn is needed.
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) return Finish(false);
    if (ready_) return;
    ready_ = true;
    all_.loop_->Rewatch(channel_->socket(), 0, *this);
    peer_->ready.splice(peer_->ready.end(), peer_->waiting, place_);
    if (!peer_->link.empty()) all_.turns_.splice(all_.turns_.end(), peer_->link);
    all_.loop_->Post(all_.turn_);
  }
  void OnTime() override {
    channel_->TimeOut();
    Finish(false);
  }
  void StopBeingReady() {
    if (!std::exchange(ready_, false)) return;
    peer_->waiting.splice(peer_->waiting.end(), peer_->ready, place_);
    if (peer_->ready.empty()) peer_->link.splice(peer_->link.end(), all_.turns_, peer_->place);
  }
  void LeavePeer() {
    StopBeingReady();
    peer_->waiting.erase(place_);
    if (peer_->waiting.empty() && peer_->ready.empty()) all_.peers_.erase(peer_name_);
  }

  TlsHandshakes& all_;
  const std::string peer_name_;
  std::unique_ptr<TlsChannel> channel_;
  const Done done_;
  std::list<Handshake*> link_{this};  // its node in the peer's lists, here until it starts
  const std::list<Handshake*>::iterator place_ = link_.begin();
  Peer* peer_ = nullptr;  // null: not started
  bool watched_ = false;
  bool ready_ = false;
  bool finished_ = false;
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
  loop_->RunAndWait([this] {
    while (!peers_.empty()) {
      Peer& peer = peers_.begin()->second;
      (peer.waiting.empty() ? peer.ready : peer.waiting).front()->Finish(false);
    }
  });
  loop_.reset();
}

void TlsHandshakes::Begin(std::string peer, std::unique_ptr<TlsChannel> channel, Done done) {
  loop_->Post(*new Handshake(*this, std::move(peer), std::move(channel), std::move(done)));
}

void TlsHandshakes::TakeTurn() {
  if (turns_.empty()) return;
  Peer& peer = *turns_.front();
  turns_.splice(turns_.end(), turns_, turns_.begin());
  peer.ready.front()->TakeStep();
  // Posted, so that events come first: another peer's client may have become ready.
  if (!turns_.empty()) loop_->Post(turn_);
}

}  // namespace attend
