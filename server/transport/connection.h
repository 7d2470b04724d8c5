// SPDX-License-Identifier: Apache-2.0
//
// A client's connection: its channel, session and calls. Used on the loop's thread only, from the
// moment it is posted there until it deletes itself.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
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
#include "server/transport/window_share.h"

namespace attend {

// Lets the rest of the server count and bound what a connection does. Called on the loop's thread;
// must not throw.
class ConnectionGuard {
 public:
  virtual ~ConnectionGuard() = default;
  // A call begins; CloseCall follows when its stream ends. An error ends the connection: its peer
  // has too many open calls.
  virtual Status OpenCall() = 0;
  virtual void CloseCall() = 0;
  // The client's first frame has come.
  virtual void OnFirstFrame() {}
  // More bytes of messages have arrived.
  virtual void OnMessageBytes(int64_t bytes) = 0;
  // The memory of unfinished and unread messages, and of the connection's read block, has changed
  // by `bytes`.
  virtual void OnKept(int64_t bytes) = 0;
  // The connection has ended and its socket is about to be closed. `why` is an error if the client
  // caused it: DEADLINE_EXCEEDED if a message has stalled, UNAVAILABLE if no frame came in time.
  virtual void OnEnd(const Status& why) = 0;
};

struct ConnectionOptions {
  Http2Session::Limits session;
  Duration handshake_timeout = std::chrono::seconds(20);  // until the first complete frame
  Duration idle_timeout = std::chrono::hours(24);         // without calls, before it is drained
  // How long a client has to acknowledge the drain.
  Duration drain_timeout = std::chrono::seconds(10);
  // Randomized by up to a tenth for each connection, so that clients that connected together do not
  // all reconnect at once.
  Duration age_max = std::chrono::hours(24 * 365);
  // Calls of a connection whose handlers are not done, including those whose streams were reset.
  int64_t calls_max = 4096;
  // A connection on which a message stalls for this long is ended; zero: none.
  Duration message_timeout{};
  // A call is cancelled whose client does not take its response for this long; zero: none.
  Duration write_timeout{};
  // Told of each such call, with its peer's address, on a loop's thread. Must not throw.
  std::function<void(const std::string& peer)> on_unread = [](const std::string&) {};
};

// Shared by all connections of a loop. Used on the loop's thread, except for the counts.
class LoopShare final : private Loop::Timer {
 public:
  LoopShare(Loop& its_loop, CallMethods& its_methods, const Clock& its_clock,
            const ConnectionOptions& its_options, std::atomic<int64_t>& all_calls,
            std::atomic<int64_t>& all_busy, size_t read_bytes_max, BlockPool& its_blocks)
      : loop(its_loop),
        methods(its_methods),
        clock(its_clock),
        options(its_options),
        calls{its_loop, all_calls},
        busy(all_busy),
        blocks(its_blocks),
        memory(new char[2 * read_bytes_max]),
        buffer(memory.get(), read_bytes_max),
        scratch(memory.get() + read_bytes_max, read_bytes_max) {
    calls.spare.reserve(CallShare::kSpareMax);
  }

  // Starts and ends the checks for clients that do not read or send. On the loop's thread.
  void BeginLooks();
  void EndLooks() { loop.Clear(*this); }

  Loop& loop;
  CallMethods& methods;
  const Clock& clock;
  const ConnectionOptions options;
  CallShare calls;
  std::atomic<int64_t>& busy;  // connections with large messages, over all loops
  BlockPool& blocks;           // for large messages
  std::vector<class Connection*> connections;
  std::atomic<int64_t> connections_count{0};
  const std::unique_ptr<char[]> memory;
  const std::span<char> buffer;                     // for reads
  const std::span<char> scratch;                    // for the channel
  std::minstd_rand random{std::random_device()()};  // for connection ages

 private:
  void OnTime() override;

  TimePoint look_at_;
};

class Connection final : public Loop::Task,
                         private Loop::Watcher,
                         private Loop::TurnEnd,
                         private Loop::Timer,
                         private Http2Session::Owner {
 public:
  // Post it to the share's loop to start it. May throw std::bad_alloc. `guard` may be null.
  Connection(LoopShare& share, std::unique_ptr<Channel> channel, ConnectionPeer peer,
             std::unique_ptr<ConnectionGuard> guard);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Asks the client to leave once its calls have ended.
  void Drain();
  // Ends the connection if its client is not trusted any more.
  void Recheck();
  // Cancels calls whose responses the client does not take, or ends the connection if it takes
  // nothing at all, or sends nothing of messages that have begun. `late`: the process has stood
  // still, and clients have their time again.
  void Look(TimePoint now, bool late);
  // Some of a response waits for the client.
  bool waits_for_client();
  const ConnectionPeer& peer() const { return *peer_; }
  // Ends the connection and its calls at once.
  void Close(Status why);  // by value: it may be the session's, which is destroyed

  // For its calls.
  Http2Session& session() { return *session_; }
  // The session may have output.
  void OnOutput() { share_.loop.AtTurnEnd(*this); }
  // More bytes of a call's messages have arrived.
  void OnMessageBytes(size_t bytes);
  // The block that holds the bytes of the current read, if messages may keep them there; else null.
  ReadBlock* block() { return reading_block_ ? &block_ : nullptr; }
  // The length of the message that the newest bytes belong to. `placed`: its remaining bytes have
  // places.
  void OnMessageLength(size_t bytes, bool placed);
  // The memory of messages that a call's handler does not have yet has changed by `bytes`.
  void OnKept(int64_t bytes);
  // The stream has closed; `whole`: after its trailers were sent. True: some of its output is still
  // on the way to the socket, and OnLeft will follow. False: the call no longer uses this.
  bool OnStreamClosed(CallStream& call, bool whole);

 private:
  static constexpr size_t kNoIndex = static_cast<size_t>(-1);

  ~Connection() = default;
  void Run() override;                      // Loop::Task: starts or deletes the connection
  void OnEvents(uint32_t events) override;  // of the socket
  void OnTurnEnd() override;
  void OnTime() override;
  Http2Stream* OnRequest(int32_t id, RequestHead&& head) override;

  void Begin();
  // Ends the connection after telling the client what it did wrong.
  void EndFor(const Status& why);
  void EndUnread(TimePoint now, bool late);
  void EndStalled(TimePoint now, bool late);
  void Read();
  // The buffer for bytes without a place: a block, if the newest message is large. `after_place`:
  // the read fills a place first.
  std::span<char> ReadBuffer(bool after_place);
  // Passes received bytes to the session.
  Status Receive(std::span<char> bytes);
  void ReleaseBlock();
  // Writes the session's output, as far as the socket accepts it.
  void Flush();
  bool WriteSome();
  void SetEvents();
  void SetTimer();
  // Answers a request that is not a valid gRPC call. Returns whether it did.
  bool Refuse(int32_t id, const RequestHead& head);

  LoopShare& share_;
  std::unique_ptr<Channel> channel_;
  const std::shared_ptr<const ConnectionPeer> peer_;
  const std::unique_ptr<ConnectionGuard> guard_;
  WindowShare window_;
  std::optional<Http2Session> session_;
  std::vector<CallStream*> calls_;  // with open streams
  // Calls whose last bytes are still in the session's output. `last`: the position, in
  // OutputQueue::added, after which all of it has left.
  struct Leaving {
    CallStream* call;
    uint64_t last;
  };
  std::deque<Leaving> leaving_;
  // Existing calls, bounded by calls_max; some have closed streams. They may outlive the
  // connection.
  const std::shared_ptr<std::atomic<int64_t>> unfinished_calls_;
  TimePoint opened_at_;
  TimePoint drain_at_;  // when it will be drained
  TimePoint idle_since_;
  size_t message_bytes_ = 0;  // length of the newest message
  bool message_placed_ = false;
  ReadBlock block_;             // large messages are read into it
  bool reading_block_ = false;  // the current read went to `block_`
  // Messages used little of a block: no more blocks until all calls have ended.
  bool block_wasted_ = false;
  MessagePace pace_;  // of what has left
  MessagePace message_pace_;
  MessagePace unread_pace_;  // of what has left while the client is not read
  int64_t came_bytes_ = 0;   // of all calls' messages
  uint32_t events_ = 0;      // registered with epoll
  bool blocked_ = false;     // the socket's buffer is full
  bool begun_ = false;
  bool spoke_ = false;    // its first frame has come
  bool closing_ = false;  // closes once its output has been sent
  bool closed_ = false;
  Status end_status_;
  size_t index_ = kNoIndex;  // in LoopShare::connections
};

}  // namespace attend
