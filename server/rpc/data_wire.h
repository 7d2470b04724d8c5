// SPDX-License-Identifier: Apache-2.0
//
// The two ends of a call that brings tensors: the wire, which carries its messages, and the
// handler, which takes them to the engine. One handler serves every wire. A wire calls its
// handler's On... functions, by one thread at a time; the handler calls the wire's from any.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <string_view>

#include "server/wire/wire_call.h"

namespace attend {

// The message of a unary call has come before there is a handler.
class UnaryWire {
 public:
  virtual ~UnaryWire() = default;
  virtual const WireCall& call() const = 0;
  // One of them, once.
  virtual void Answer(grpc::ByteBuffer&& answer) = 0;
  virtual void Fail(const grpc::Status& status) = 0;
};

class UnaryHandler {
 public:
  // The answer is no longer wanted.
  virtual void OnCancel() = 0;
  // Last: what was said has left, or cannot. The wire goes after this.
  virtual void OnDone() = 0;

 protected:
  ~UnaryHandler() = default;
};

class StreamHandler;

// At most one read and one write are under way.
class StreamWire {
 public:
  virtual ~StreamWire() = default;
  virtual const WireCall& call() const = 0;
  // Its handler, before anything is asked of it. Without one all that may be said is End.
  virtual void Give(StreamHandler& handler) = 0;
  // OnReadDone follows, but not always after End.
  virtual void Read(grpc::ByteBuffer* to) = 0;
  // OnWriteDone follows. `hurries`: no other message is about to.
  virtual void Write(const grpc::ByteBuffer* message, bool hurries) = 0;
  virtual void End(const grpc::Status& status) = 0;
};

class StreamHandler {
 public:
  // False: no message comes any more.
  virtual void OnReadDone(bool ok) = 0;
  // In its place, of a message that is there until this returns. False: the handler would have it
  // where it asked for it.
  virtual bool OnLent(std::string_view) { return false; }
  virtual void OnWriteDone(bool ok) = 0;
  virtual void OnCancel() = 0;
  virtual void OnDone() = 0;

 protected:
  ~StreamHandler() = default;
};

}  // namespace attend
