// SPDX-License-Identifier: Apache-2.0
//
// A call as seen by the server's methods. Modelled on gRPC's reactors: at most one read and one
// write are in progress, each ends with a callback of the handler, and a call ends with Finish,
// then OnDone.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/channel.h"
#include "server/transport/message_assembler.h"
#include "server/transport/message_bound.h"
#include "server/transport/metadata.h"
#include "server/util/message.h"

namespace attend {

// How a call ends.
struct CallEnd {
  Status status;
  CallMetadata trailers;
};

// The server's end of a call. Functions may be called on any thread. None calls the handler
// synchronously, so locks may be held. Valid until OnDone returns.
class ServerCall {
 public:
  // Constant for the whole call.
  virtual const std::string& path() const = 0;
  virtual const CallMetadata& metadata() const = 0;
  virtual const ConnectionPeer& peer() const = 0;
  virtual TimePoint deadline() const = 0;  // kNever: none

  // Requests the next message: OnMessage or OnHalfClose follows. On a cancelled call it is
  // OnHalfClose.
  virtual void Read() = 0;
  // Sends a message. OnWritten follows on the loop's thread, possibly before this returns, once few
  // bytes of the call are waiting for the client. So a client that does not read stalls the call
  // and takes no memory.
  virtual void Write(OutMessage message) = 0;
  // Adds a response header. Must precede the first Write and Finish.
  virtual void AddHeader(std::string_view key, std::string_view value) = 0;
  // Ends the call once everything written has left. Call once. Need not wait for OnWritten, which
  // is still called.
  virtual void Finish(CallEnd end) = 0;

  // Resets the call, for example one whose client does not read. OnCancel follows. Allowed until
  // OnDone.
  virtual void Cancel() = 0;
  // The response is no longer wanted: the client left or reset the call, or the deadline has
  // passed. Once true, stays true.
  virtual bool cancelled() const = 0;

 protected:
  ~ServerCall() = default;
};

// The handler of a call. Called on the loop's thread, one callback at a time. A callback may call
// any function of its call and must not throw.
class CallHandler {
 public:
  virtual void OnMessage(InMessage message) = 0;
  // A large message of `bytes` has begun with `begun`. Returns where parts of the rest should be
  // stored; null: anywhere. Called at most once per message.
  virtual std::shared_ptr<MessagePlaces> Place(std::span<const MessagePiece> /*begun*/,
                                               int64_t /*bytes*/) {
    return nullptr;
  }
  virtual void OnHalfClose() = 0;
  // `ok` is false if the message can no longer arrive.
  virtual void OnWritten(bool ok) = 0;
  // Called at most once. The call must still be finished.
  virtual void OnCancel() = 0;
  // The last callback, after Finish. The handler may delete itself.
  virtual void OnDone() = 0;

 protected:
  ~CallHandler() = default;
};

// The methods of a server. Must outlive every call.
class CallMethods {
 public:
  // Maximum size of a message of the method. Any thread; must not throw.
  virtual MessageBound MessageBoundOf(std::string_view path) const = 0;
  // A call begins: its headers are complete, and no message bytes have been kept. On the loop's
  // thread; if it throws std::bad_alloc, the call has not begun. Returns the handler, which may
  // already have ended the call.
  virtual CallHandler* Begin(ServerCall& call) = 0;
  // Everything received in this turn, on all connections of the loop, has been passed to the
  // handlers. On the loop's thread; must not throw.
  virtual void OnTaken() {}

 protected:
  ~CallMethods() = default;
};

}  // namespace attend
