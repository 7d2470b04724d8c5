// SPDX-License-Identifier: Apache-2.0
//
// A gRPC call on an HTTP/2 stream: implements gRPC's rules between the session and the handler of
// the method.
//
// All work happens on the loop's thread, in Apply, which calls the handler and is not reentrant:
// what the handler requests in a callback is done after the callback has returned. Requests from
// outside, on any thread, are stored in `asked_`, and the call is posted. So no function of the
// call invokes the handler synchronously, and callers may hold locks. The call deletes itself after
// the handler's OnDone, but not before a pending post has run.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/transport/client_pace.h"
#include "server/transport/http2_session.h"
#include "server/transport/loop.h"
#include "server/transport/message_assembler.h"
#include "server/transport/server_call.h"

namespace attend {

class Connection;

// Buffers of ended calls, reused for later ones, so that a small call allocates little.
struct CallParts {
  RequestHead head;
  CallMetadata headers, trailers;  // of the response
  OutputQueue output;
};

// Shared by all calls of a loop. Used on the loop's thread, except for the count.
struct CallShare {
  // About 100 KiB with ordinary calls.
  static constexpr size_t kSpareMax = 128;

  Loop& loop;
  std::atomic<int64_t>& calls;  // existing calls, over all loops
  std::vector<CallParts> spare{};
};

class CallStream final : public ServerCall,
                         public Http2Stream,
                         private Loop::Task,
                         private Loop::Timer {
 public:
  // Takes `head` and leaves a used one in exchange. `siblings` counts the connection's calls.
  // `share` must outlive the call, `connection` its stream.
  CallStream(CallShare& share, Connection& connection, int32_t id, RequestHead& head,
             std::shared_ptr<const ConnectionPeer> peer, TimePoint deadline, MessageBound bound,
             std::shared_ptr<std::atomic<int64_t>> siblings);
  CallStream(const CallStream&) = delete;
  CallStream& operator=(const CallStream&) = delete;

  // Asks `methods` for the handler. On the loop's thread. May throw std::bad_alloc: the call has
  // not begun then and must be deleted with Drop.
  void Begin(CallMethods& methods);
  void Drop() { delete this; }

  const std::string& path() const override { return parts_.head.path; }
  const CallMetadata& metadata() const override { return parts_.head.metadata; }
  const ConnectionPeer& peer() const override { return *peer_; }
  TimePoint deadline() const override { return deadline_; }
  void Read() override;
  void Write(OutMessage message) override;
  void AddHeader(std::string_view key, std::string_view value) override;
  void Finish(CallEnd end) override;
  void Cancel() override;
  bool cancelled() const override { return cancelled_.load(std::memory_order_seq_cst); }

  void OnData(std::string_view bytes) override;
  std::span<char> Room() const override;
  void OnEnd() override;
  void OnTaken(size_t bytes) override;
  void OnClose() override;
  // All its output has reached the socket, or is lost.
  void OnLeft(bool arrived);

  // Whether the client takes the response. `restart`: its time begins now. Call it several times
  // per timeout.
  bool IsRead(bool restart, TimePoint now, Duration timeout) {
    return cancelled() || pace_.Keeps(output, writing_, restart, now, timeout);
  }
  bool waits_for_client() const { return !output.empty(); }
  // The handler waits for the rest of a message that has begun.
  bool waits_for_message() const { return reading_ && assembler_.under_way() && !answered_; }
  // Whether such a message has made no progress for `timeout`, by itself. `restart`: its time
  // begins now. Call it several times per timeout.
  bool IsStalled(bool restart, TimePoint now, Duration timeout);

  int32_t id() const { return id_; }
  // Index in the connection's list.
  size_t place = 0;

 private:
  // Requests of the handler that are pending.
  struct Asked {
    bool read = false;
    std::optional<OutMessage> write;
    std::optional<CallEnd> end;
    bool cancel = false;
    bool any() const { return read || write || end || cancel; }
  };

  ~CallStream();
  void Run() override;     // Loop::Task
  void OnTime() override;  // Loop::Timer: the deadline
  template <class F>
  void Ask(const F& ask);
  bool TakeAsked(Asked& asked);
  void Apply();
  // Each calls the handler at most once and returns whether it did.
  bool Advance();
  bool ReadOne();
  void Do(Asked& asked);
  void Send(const OutMessage& message);
  void End(const CallEnd& end);
  // Ends the call with `status`, in place of the handler, after an error of the client.
  void Fail(const Status& status);
  void SendEnd(const CallEnd& end);
  // Resets the call: its reset was requested, or there is no memory for the rest of its response.
  void Lose(uint32_t http2_error);
  void Keep(std::string_view bytes);
  void Forget();  // drops the bytes kept
  // Reports the change in memory to the connection.
  void TellKept();

  CallShare& share_;
  Loop& loop_;
  Connection* connection_;  // null once the stream is closed
  const int32_t id_;
  CallParts parts_;
  const std::shared_ptr<const ConnectionPeer> peer_;  // shared by all calls of the connection
  const TimePoint deadline_;
  const std::shared_ptr<std::atomic<int64_t>> siblings_;
  CallHandler* handler_ = nullptr;
  std::atomic<bool> cancelled_{false};

  Mutex mutex_;
  Asked asked_ ATTEND_GUARDED_BY(mutex_);

  // Below: used on the loop's thread only.
  MessageAssembler assembler_;
  std::string unread_;    // received, but not asked for yet
  size_t unread_at_ = 0;  // how much of it has been consumed
  int64_t told_kept_ = 0;
  std::string_view incoming_;  // received in the current OnData
  OutputPace pace_;
  MessagePace message_pace_;
  int64_t came_bytes_ = 0;  // of messages
  bool applying_ = false;
  bool half_closed_ = false;  // the client sends no more
  bool reading_ = false;      // the handler is waiting for a message
  bool writing_ = false;      // the handler is waiting for OnWritten
  bool responded_ = false;    // response headers have been handed to the session
  bool answered_ = false;     // the end of the response too
  bool ended_ = false;        // the handler has called Finish
  bool late_ = false;         // cancelled by its deadline
  bool told_cancelled_ = false;
  bool leaving_ = false;  // the stream is closed, OnLeft will follow
  bool done_ = false;     // OnDone has been called
};

}  // namespace attend
