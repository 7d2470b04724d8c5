// SPDX-License-Identifier: Apache-2.0
//
// Each loop has its share of connections; a new one goes to the loop with the fewest. Nothing moves
// between loops afterwards.

#include "server/transport/http2_transport.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

namespace attend {

struct Http2Transport::Part {
  // A task that only shows that the loop runs.
  class Look final : public Loop::Task {
   public:
    void Run() override { answered_.store(true); }
    // How long the last post has been unanswered; posts again if it was answered.
    Duration Ask(Loop& loop, TimePoint now) {
      if (!answered_.exchange(false)) return now - asked_;
      asked_ = now;
      loop.Post(*this);
      return Duration::zero();
    }

   private:
    std::atomic<bool> answered_{true};
    TimePoint asked_;
  };

  class ForAll final : public Loop::Task {
   public:
    ForAll(Part& part, void (Connection::*act)()) : part_(part), act_(act) {}
    void Run() override {
      const std::vector<Connection*>& all = part_.share->connections;
      // Backwards, because a connection that ends is replaced by the last one.
      for (size_t i = all.size(); i-- > 0;) (all[i]->*act_)();
    }

   private:
    Part& part_;
    void (Connection::*const act_)();
  };

  std::optional<LoopShare> share;
  ForAll drain{*this, &Connection::Drain}, recheck{*this, &Connection::Recheck};
  Look look;
  std::unique_ptr<Loop> loop;  // destroyed first: its thread uses the rest
};

Http2Transport::Http2Transport(const Clock& clock) : clock_(clock) {}

Result<std::unique_ptr<Http2Transport>> Http2Transport::Start(const Options& options,
                                                              CallMethods& methods,
                                                              const Clock& clock) {
  // Versions older than the one it was built with are untested.
  if (nghttp2_version(NGHTTP2_VERSION_NUM) == nullptr) {
    return Unimplemented(std::string("libnghttp2 is ") + nghttp2_version(0)->version_str +
                         ", must be " NGHTTP2_VERSION " or newer");
  }
  std::unique_ptr<Http2Transport> transport(new Http2Transport(clock));
  for (int i = 0; i < std::max(1, options.loops); ++i) {
    auto part = std::make_unique<Part>();
    Result<std::unique_ptr<Loop>> loop =
        Loop::Start("attend-loop", clock, [&methods] { methods.OnTaken(); });
    if (!loop.ok()) return loop.status();
    part->loop = std::move(*loop);
    part->share.emplace(*part->loop, methods, clock, options.connection, transport->calls_,
                        transport->busy_, options.read_bytes_max,
                        options.blocks == nullptr ? transport->heap_ : *options.blocks);
    part->loop->RunAndWait([&part] { part->share->BeginLooks(); });
    transport->parts_.push_back(std::move(part));
  }
  return transport;
}

Http2Transport::~Http2Transport() {
  for (const auto& part : parts_) {
    part->loop->RunAndWait([&part] {
      part->share->EndLooks();
      std::vector<Connection*>& all = part->share->connections;
      while (!all.empty()) all.back()->Close(Status());
    });
  }
  // Handlers may still be running anywhere in the server.
  for (int64_t calls = calls_.load(); calls > 0; calls = calls_.load()) calls_.wait(calls);
}

void Http2Transport::Serve(std::unique_ptr<Channel> channel, ConnectionPeer peer,
                           std::unique_ptr<ConnectionGuard> guard) {
  const auto fewest =
      std::min_element(parts_.begin(), parts_.end(), [](const auto& a, const auto& b) {
        return a->share->connections_count.load(std::memory_order_relaxed) <
               b->share->connections_count.load(std::memory_order_relaxed);
      });
  LoopShare& share = *(*fewest)->share;
  auto* const connection =
      new Connection(share, std::move(channel), std::move(peer), std::move(guard));
  share.connections_count.fetch_add(1, std::memory_order_relaxed);
  share.loop.Post(*connection);
}

void Http2Transport::Drain() {
  for (const auto& part : parts_) part->loop->Post(part->drain);
}

void Http2Transport::Recheck() {
  for (const auto& part : parts_) part->loop->Post(part->recheck);
}

int64_t Http2Transport::CountConnections() const {
  int64_t sum = 0;
  for (const auto& part : parts_) {
    sum += part->share->connections_count.load(std::memory_order_relaxed);
  }
  return sum;
}

std::vector<std::string> Http2Transport::WaitingPeers() const {
  std::vector<std::string> peers;
  for (const auto& part : parts_) {
    part->loop->RunAndWait([&] {
      try {
        for (Connection* const connection : part->share->connections) {
          if (connection->waits_for_client()) peers.push_back(connection->peer().address);
        }
      } catch (const std::bad_alloc&) {  // those found so far
      }
    });
  }
  return peers;
}

Duration Http2Transport::StoodStill() {
  Duration longest{0};
  const MutexLock lock(mutex_);
  for (const auto& part : parts_) {
    longest = std::max(longest, part->look.Ask(*part->loop, clock_.Now()));
  }
  return longest;
}

}  // namespace attend
