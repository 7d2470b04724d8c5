// SPDX-License-Identifier: Apache-2.0
//
// A call on a stream of HTTP/2: gRPC's rules between a session and the method that handles the
// call.
//
// Everything happens on the loop's thread, in Apply, which calls the handler and is not entered
// twice: what the handler asks for meanwhile is done once its callback has returned. What is asked
// for elsewhere, on whatever thread, is left in `asked_`, and the call is posted. So no function
// that a handler calls calls a handler, and locks may be held around it. The call deletes itself
// once the handler has heard OnDone, and no sooner than its post has run.

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
#include "server/transport/http2_session.h"
#include "server/transport/loop.h"
#include "server/transport/message_assembler.h"
#include "server/transport/server_call.h"

namespace attend {

// A call's connection. On the loop's thread.
class CallOwner {
 public:
  virtual Http2Session& session() = 0;
  // The session may have something to send.
  virtual void OnOutput() = 0;
  // The next bytes of the call's messages came.
  virtual void OnMessageBytes(int32_t id, std::string_view bytes) = 0;
  // Where the bytes of the current read lie, if messages may stay there; else null.
  virtual ReadBlock* block() = 0;
  // The message that the newest bytes belong to has so many. `placed`: the rest of it has places.
  virtual void OnMessageLength(size_t bytes, bool placed) = 0;
  // So many bytes more, or less, of them are kept until they are asked for.
  virtual void OnKept(int64_t bytes) = 0;
  // The stream has ended; `whole`: with all that the call had to say. True: some of that is still
  // on its way to the socket, and OnLeft follows. Else the call does not use its owner any more.
  virtual bool OnStreamClosed(class CallStream& call, bool whole) = 0;
  // The client does not read what is on its way there.
  virtual void OnUnread() = 0;

 protected:
  ~CallOwner() = default;
};

// The parts of calls that have ended serve the next ones, so that a small call takes little from
// the heap.
struct CallParts {
  RequestHead head;
  CallMetadata headers, trailers;  // of the answer
  OutputQueue output;
};

// Shared by all calls of a loop. The loop's thread, but for the count.
struct CallShare {
  // Some 100 KiB of usual calls' parts.
  static constexpr size_t kSpareMax = 128;

  Loop& loop;
  std::atomic<int64_t>& calls;  // that there are, of all loops
  std::vector<CallParts> spare{};
};

class CallStream final : public ServerCall,
                         public Http2Stream,
                         private Loop::Task,
                         private Loop::Timer {
 public:
  // Takes `head`, and leaves another to be used again. `siblings` counts the calls of the
  // connection. `share` must outlive the call, `owner` its stream.
  CallStream(CallShare& share, CallOwner& owner, int32_t id, RequestHead& head,
             std::shared_ptr<const ConnectionPeer> peer, TimePoint deadline,
             int64_t message_bytes_max, std::shared_ptr<std::atomic<int64_t>> siblings);
  CallStream(const CallStream&) = delete;
  CallStream& operator=(const CallStream&) = delete;

  // Asks `methods` for the handler. On the loop's thread. May throw std::bad_alloc: then the call
  // has not begun, and Drop deletes it.
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
  // All of it is in the socket, or is lost.
  void OnLeft(bool arrived);

  int32_t id() const { return id_; }
  // Its place in its connection's list.
  size_t place = 0;

 private:
  // Things that the handler wants done.
  struct Asked {
    bool read = false;
    std::optional<OutMessage> write;
    std::optional<CallEnd> end;
    bool cancel = false;
    bool any() const { return read || write || end || cancel; }
  };

  ~CallStream();
  void Run() override;     // of the task
  void OnTime() override;  // of the timer: the deadline
  template <class F>
  void Ask(const F& ask);
  bool TakeAsked(Asked& asked);
  void Apply();
  // These call the handler once and say whether they did.
  bool Advance();
  bool ReadOne();
  void Do(Asked& asked);
  void Send(const OutMessage& message);
  void End(const CallEnd& end);
  // The call goes on no more, for a fault of its client's: says so, in the handler's place.
  void Fail(const Status& status);
  void SendEnd(const CallEnd& end);
  // Resets the call: its end is asked for, or there is no memory for what its client should hear,
  // and half an answer is none.
  void Lose(uint32_t http2_error);
  void Keep(std::string_view bytes);
  void Forget();  // what was kept
  // Tells the owner how much is kept now.
  void TellKept();

  CallShare& share_;
  Loop& loop_;
  CallOwner* owner_;  // null once the stream is closed
  const int32_t id_;
  CallParts parts_;
  const std::shared_ptr<const ConnectionPeer> peer_;  // of all calls of its connection
  const TimePoint deadline_;
  const std::shared_ptr<std::atomic<int64_t>> siblings_;
  CallHandler* handler_ = nullptr;
  std::atomic<bool> cancelled_{false};

  Mutex mutex_;
  Asked asked_ ATTEND_GUARDED_BY(mutex_);

  // The loop's thread's.
  MessageAssembler assembler_;
  std::string unread_;    // what has come and was not asked for
  size_t unread_at_ = 0;  // of which this much has been read
  int64_t told_kept_ = 0;
  std::string_view incoming_;  // what came just now
  bool applying_ = false;
  bool half_closed_ = false;  // the client sends no more
  bool reading_ = false;      // the handler waits for a message
  bool writing_ = false;      // it waits for OnWritten
  bool responded_ = false;    // headers of the answer are under way
  bool answered_ = false;     // the end of the answer is
  bool ended_ = false;        // the handler has called Finish
  bool late_ = false;         // its deadline has cancelled it
  bool told_cancelled_ = false;
  bool leaving_ = false;  // the stream is closed, OnLeft follows
  bool done_ = false;     // it has heard OnDone
};

}  // namespace attend
