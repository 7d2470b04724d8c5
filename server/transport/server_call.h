// SPDX-License-Identifier: Apache-2.0
//
// A call as the server's methods see it. The shape is that of gRPC's reactors: at most one read and
// one write are under way, each ends with a callback of the handler, and a call ends with Finish
// and then OnDone.

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
#include "server/transport/metadata.h"
#include "server/util/message.h"

namespace attend {

// How a call ends.
struct CallEnd {
  Status status;
  CallMetadata trailers;
};

// The server's end of a call. Any thread; none of its functions calls the handler before it
// returns, so locks may be held. Lives until OnDone returns.
class ServerCall {
 public:
  // These are the same for the whole call.
  virtual const std::string& path() const = 0;
  virtual const CallMetadata& metadata() const = 0;
  virtual const ConnectionPeer& peer() const = 0;
  virtual TimePoint deadline() const = 0;  // kNever: none

  // Asks for the next message: OnMessage follows, or OnHalfClose. On a cancelled call it is
  // OnHalfClose.
  virtual void Read() = 0;
  // Sends a message, after which OnWritten follows, maybe before this returns: once few bytes of
  // the call wait for its client, so a client that does not read stops the call and takes no
  // memory.
  virtual void Write(OutMessage message) = 0;
  // Headers of the answer. Before the first Write and Finish.
  virtual void AddHeader(std::string_view key, std::string_view value) = 0;
  // Ends the call once all that was written has left. Once. It need not wait for OnWritten, which
  // still comes.
  virtual void Finish(CallEnd end) = 0;

  // Resets the call, such as one whose client does not read. OnCancel follows. Until OnDone.
  virtual void Cancel() = 0;
  // The answer is no longer wanted: the client went, or reset the call, or its deadline has passed.
  // Once true, stays true.
  virtual bool cancelled() const = 0;

 protected:
  ~ServerCall() = default;
};

// A method's end of it. Called on the loop's thread, by one at a time; a callback may call any
// function of its call. None may throw.
class CallHandler {
 public:
  virtual void OnMessage(InMessage message) = 0;
  // A large message of `bytes` has begun with `begun`: where parts of the rest are to lie. Null:
  // anywhere. At most once for a message.
  virtual std::shared_ptr<MessagePlaces> Place(std::span<const MessagePiece> /*begun*/,
                                               int64_t /*bytes*/) {
    return nullptr;
  }
  virtual void OnHalfClose() = 0;
  // False: it cannot arrive any more.
  virtual void OnWritten(bool ok) = 0;
  // At most once. The call still needs its Finish.
  virtual void OnCancel() = 0;
  // Last, after Finish. The handler may delete itself.
  virtual void OnDone() = 0;

 protected:
  ~CallHandler() = default;
};

// All methods of a server. Must outlive every call.
class CallMethods {
 public:
  // The most bytes that one message of that method may have. Any thread; may not throw.
  virtual int64_t MessageBytesMax(std::string_view path) const = 0;
  // A call begins: its headers are whole, none of its messages has been kept. On the loop's thread;
  // may throw std::bad_alloc, and has then not begun. Returns what handles it from now on, which
  // may have ended it already.
  virtual CallHandler* Begin(ServerCall& call) = 0;
  // All that came at once, on whatever connections of a loop, has been handed to the handlers. On
  // the loop's thread; may not throw.
  virtual void OnTaken() {}

 protected:
  ~CallMethods() = default;
};

}  // namespace attend
