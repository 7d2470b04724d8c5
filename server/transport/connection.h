// SPDX-License-Identifier: Apache-2.0
//
// One client's connection: its channel, its session and its calls. All of it belongs to the thread
// of its loop, from the moment that it is posted there until it deletes itself.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/block_pool.h"
#include "server/transport/call_stream.h"
#include "server/transport/channel.h"
#include "server/transport/http2_session.h"
#include "server/transport/loop.h"
#include "server/transport/server_call.h"

namespace attend {

// Through it the rest of the server counts and bounds what a connection does. On its loop's thread;
// may not throw.
class ConnectionGuard {
 public:
  virtual ~ConnectionGuard() = default;
  // A call begins, and ends once its stream does. An error ends the connection: its peer has too
  // many open.
  virtual Status OpenCall(int32_t id) = 0;
  virtual void CloseCall(int32_t id) = 0;
  // The next bytes of a call's messages came.
  virtual void OnMessageBytes(int32_t id, std::string_view bytes) = 0;
  // So many bytes more, or less, are kept: of messages that no call has asked for yet, and the
  // block that the connection reads into.
  virtual void OnKept(int64_t bytes) = 0;
  // The client may send so many bytes more of a call's messages; of all, if the id is 0.
  virtual void OnGrant(int32_t id, int64_t bytes) = 0;
  // The connection is over, and its socket is about to be closed. `why` is an error if it was ended
  // for what its client did.
  virtual void OnEnd(const Status& why) = 0;
};

struct ConnectionOptions {
  Http2Session::Limits session;
  Duration handshake_timeout = std::chrono::seconds(20);  // until its first frame is whole
  Duration idle_timeout = std::chrono::hours(24);         // without calls: then it is drained
  Duration drain_timeout = std::chrono::seconds(10);      // until a client must know of its drain
  // Each connection's is up to a tenth shorter or longer, so that clients that came together do not
  // all go, and come again, at once.
  Duration age_max = std::chrono::hours(24 * 365);
  // Calls of a connection whose handlers are not done, those among them whose streams were reset.
  int64_t calls_max = 4096;
};

// Shared by all connections of a loop. The loop's thread, but for the counts.
struct LoopShare {
  LoopShare(Loop& its_loop, CallMethods& its_methods, const Clock& its_clock,
            const ConnectionOptions& its_options, std::atomic<int64_t>& all_calls,
            size_t read_bytes_max, BlockPool& its_blocks)
      : loop(its_loop),
        methods(its_methods),
        clock(its_clock),
        options(its_options),
        calls{its_loop, all_calls},
        blocks(its_blocks),
        memory(new char[2 * read_bytes_max]),
        buffer(memory.get(), read_bytes_max),
        scratch(memory.get() + read_bytes_max, read_bytes_max) {
    calls.spare.reserve(CallShare::kSpareMax);
  }

  Loop& loop;
  CallMethods& methods;
  const Clock& clock;
  const ConnectionOptions options;
  CallShare calls;
  BlockPool& blocks;  // for large messages
  std::vector<class Connection*> connections;
  std::atomic<int64_t> connections_count{0};
  std::atomic<int64_t> padding_bytes{0};  // that came and meant nothing
  const std::unique_ptr<char[]> memory;
  const std::span<char> buffer;                     // of a read
  const std::span<char> scratch;                    // of a channel
  std::minstd_rand random{std::random_device()()};  // of ages
};

class Connection final : public Loop::Task,
                         private Loop::Watcher,
                         private Loop::TurnEnd,
                         private Loop::Timer,
                         private Http2Session::Owner,
                         private CallOwner {
 public:
  // Post it to the share's loop, where it begins. May throw std::bad_alloc. `guard`: null for none.
  Connection(LoopShare& share, std::unique_ptr<Channel> channel, ConnectionPeer peer,
             std::unique_ptr<ConnectionGuard> guard);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Asks the client to go once its calls have ended.
  void Drain();
  // Ends the connection and its calls at once.
  void Close(Status why);  // of its own: the session has one too, and goes

 private:
  static constexpr size_t kNoIndex = static_cast<size_t>(-1);

  ~Connection() = default;
  void Run() override;                      // of the task: begins it, or deletes it
  void OnEvents(uint32_t events) override;  // of the socket
  void OnTurnEnd() override;
  void OnTime() override;
  Http2Stream* OnRequest(int32_t id, RequestHead&& head) override;
  Http2Session& session() override { return *session_; }
  void OnOutput() override { share_.loop.AtTurnEnd(*this); }
  void OnMessageBytes(int32_t id, std::string_view bytes) override;
  ReadBlock* block() override { return reading_block_ ? &block_ : nullptr; }
  void OnMessageLength(size_t bytes, bool placed) override {
    message_bytes_ = bytes;
    message_placed_ = placed;
  }
  void OnKept(int64_t bytes) override;
  void OnGrant(int32_t id, int64_t bytes) override;
  bool OnStreamClosed(CallStream& call, bool whole) override;
  void OnUnread() override { EndFor(Status()); }

  void Begin();
  // Ends the connection once its client has been told that it did what it may not.
  void EndFor(const Status& why);
  void Read();
  // Where the next bytes go that have no place of their own: a block, if the newest message is
  // large. `after_place`: they follow bytes that have.
  std::span<char> ReadBuffer(bool after_place);
  // Takes what was read.
  Status Receive(std::span<char> bytes);
  void ReleaseBlock();
  // Writes what the session has to say, as far as the socket takes it.
  void Flush();
  bool WriteSome();
  void SetEvents();
  void SetTimer();
  // Answers a request that is no call of gRPC, if it is none.
  bool Refuse(int32_t id, const RequestHead& head);

  LoopShare& share_;
  std::unique_ptr<Channel> channel_;
  const std::shared_ptr<const ConnectionPeer> peer_;
  const std::unique_ptr<ConnectionGuard> guard_;
  std::optional<Http2Session> session_;
  std::vector<CallStream*> calls_;  // whose streams are open
  // Those with bytes in the session's output, the last of which is that one of all.
  struct Leaving {
    CallStream* call;
    uint64_t last;
  };
  std::deque<Leaving> leaving_;
  // Calls that there are, for calls_max: the streams of some are closed. They may outlive this.
  const std::shared_ptr<std::atomic<int64_t>> unfinished_calls_;
  TimePoint opened_at_;
  TimePoint drain_at_;  // from when on it is drained
  TimePoint idle_since_;
  size_t message_bytes_ = 0;  // of the newest message
  bool message_placed_ = false;
  ReadBlock block_;             // that large messages are read into
  bool reading_block_ = false;  // the bytes of the current read lie in `block_`
  bool block_wasted_ = false;   // messages kept little of one: no more while there are calls
  uint32_t events_ = 0;         // that are watched
  bool blocked_ = false;        // the socket takes no more
  bool begun_ = false;
  bool draining_ = false;
  bool drain_ended_ = false;  // as far as its client goes
  bool closing_ = false;      // once what there is has been sent
  bool closed_ = false;
  Status end_status_;
  size_t index_ = kNoIndex;  // in the share's list
};

}  // namespace attend
