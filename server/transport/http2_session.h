// SPDX-License-Identifier: Apache-2.0
//
// The server's end of an HTTP/2 connection without its socket: bytes in, bytes out. libnghttp2
// enforces HTTP/2's rules; this class adds bounds on what a client may ask for.
//
// Used by one thread at a time. Send must not be called from callbacks; everything else may.
// Callbacks are made from Receive and Send, never from the destructor. A callback may throw
// std::bad_alloc, which ends the connection.
//
// A stream's window opens as its owner consumes data; the connection's opens as data arrives, so
// that an unread stream does not stall the others. Unread data is therefore bounded by the number
// of streams times their window.

#pragma once

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/frame_budget.h"
#include "server/transport/frame_cutter.h"
#include "server/transport/header_block.h"
#include "server/transport/http2_memory.h"
#include "server/transport/metadata.h"
#include "server/transport/output_queue.h"
#include "server/transport/request_head.h"

namespace attend {

// A stream of a session, from its request to OnClose.
class Http2Stream {
 public:
  virtual void OnData(std::string_view bytes) = 0;
  // Where the next bytes of OnData should be read to, at most as many as belong there. Empty:
  // anywhere.
  virtual std::span<char> Room() const { return {}; }
  // The client sends no more.
  virtual void OnEnd() = 0;
  // `bytes` of `output` have moved to the connection's output.
  virtual void OnTaken(size_t bytes) = 0;
  // The stream has ended: either `trailers_sent`, or the client reset it, or the connection ended.
  // The session no longer uses the object.
  virtual void OnClose() = 0;

 protected:
  ~Http2Stream() = default;

  // The response body. Call Http2Session::Resume after adding to it.
  OutputQueue output{kBlockBytes};
  static constexpr size_t kBlockBytes = 256;  // enough for a message's prefix

 private:
  friend class Http2Session;
  const CallMetadata* trailers_ = nullptr;  // sent after `output`
  bool deferred_ = false;                   // nghttp2 is waiting for Resume

 protected:
  bool trailers_sent = false;
};

class Http2Session {
 public:
  struct Limits {
    uint32_t streams_max = 1024;
    // A larger list refuses the call; eight times as much ends the connection.
    int64_t header_list_bytes_max = int64_t{8} << 10;
    int32_t stream_window_bytes = 1 << 20;
    int32_t connection_window_bytes = 16 << 20;  // see also SetWindow
    uint32_t frame_bytes_max = 1 << 18;
    // At this size nothing more is produced until some of the output has left.
    size_t output_bytes_max = size_t{1} << 20;
    FrameRates rates;
  };

  class Owner {
   public:
    // A request has begun on the stream. Null: it was answered completely or reset, and further
    // data is discarded. The head may be exchanged for another one to be reused.
    virtual Http2Stream* OnRequest(int32_t id, RequestHead&& head) = 0;

   protected:
    ~Owner() = default;
  };

  // The arguments must outlive the session.
  Http2Session(const Limits& limits, Owner& owner, const Clock& clock);
  ~Http2Session();
  Http2Session(const Http2Session&) = delete;
  Http2Session& operator=(const Http2Session&) = delete;

  // Processes received bytes. An error describes the client's violation: send the remaining output,
  // which may tell the client, then close the connection.
  Status Receive(std::string_view bytes);
  // Writes frames to `output`, up to its bound.
  Status Send();
  OutputQueue& output() { return output_; }
  bool wants_send() const { return nghttp2_session_want_write(session_) != 0; }
  // Nothing more will be sent or received, once the output has left.
  bool over() const { return !wants_send() && nghttp2_session_want_read(session_) == 0; }

  // Not OK once the client has been sent a GOAWAY for a violation.
  const Status& wrong() const { return wrong_; }

  // Begins the response on an open stream: `first`, then `headers`.
  void Respond(int32_t id, Http2Stream& stream, const CallMetadata& headers,
               std::span<const ConstantHeader> first = {});
  // The stream's `output` has grown.
  void Resume(int32_t id, Http2Stream& stream);
  // Ends the response after the rest of `output`. The trailers must outlive the stream.
  void End(int32_t id, Http2Stream& stream, const CallMetadata& trailers);
  // Ends a stream without a response so far, with a single HEADERS frame.
  void RespondWhole(int32_t id, const CallMetadata& headers,
                    std::span<const ConstantHeader> first = {});
  void Reset(int32_t id, uint32_t error_code);
  // `bytes` received on a stream are no longer kept: the client may send as many more.
  void Consume(int32_t id, size_t bytes);

  // Sets the connection's receive window. A smaller one takes effect as data arrives. The
  // connection must end after an error.
  Status SetWindow(int32_t bytes);

  // Asks the client to open no more streams. Those already on their way are served.
  void Drain();
  bool draining() const { return draining_; }
  // Refuses further streams. After Drain this happens by itself once the client has acknowledged.
  void EndDrain();
  bool drain_ended() const { return drain_ended_; }
  // Ends the connection and all streams, once the frame has been sent.
  void Terminate(uint32_t error_code);

  // Frames received.
  int64_t frame_count() const { return frame_count_; }
  // Where the next bytes should be read to, if they belong to a stream: at most the rest of their
  // frame. Empty: anywhere.
  std::span<char> Room() const;
  // Length of the newest DATA frame.
  size_t data_frame_bytes() const { return data_frame_bytes_; }

 private:
  struct Callbacks;

  // Judges the frame that begins by its head. False: not allowed, and a complaint is set.
  bool JudgeFrame();
  int BeginHeaders(const nghttp2_frame& frame);
  int AddHeader(std::string_view name, std::string_view value);
  void EndFrame(const nghttp2_frame& frame);
  void EndHeaders(const nghttp2_frame& frame);
  ssize_t ReadOutput(int32_t id, Http2Stream& stream, size_t bytes_max, uint32_t& flags);
  void Sent(const nghttp2_frame& frame);
  Http2Stream* Find(int32_t id) const;
  void Complain(std::string what, uint32_t error = NGHTTP2_ENHANCE_YOUR_CALM) {
    complaint_ = std::move(what);
    complaint_error_ = error;
  }

  const Limits limits_;
  int32_t window_bytes_;  // of the connection
  Owner& owner_;
  const Clock& clock_;
  Http2Memory memory_;
  nghttp2_session* session_ = nullptr;
  OutputQueue output_;
  FrameCutter frames_;
  // The frame being received resets a stream that has not begun. To RFC 9113 (5.1) and nghttp2 that
  // is a connection error, which ends all other calls too. But gRPC's clients and Envoy send it for
  // a call that is cancelled before its headers have left, and gRPC's servers ignore it.
  bool left_out_ = false;
  FrameBudget budget_;
  int64_t frame_count_ = 0;
  size_t data_frame_bytes_ = 0;  // of the newest DATA frame
  TimePoint now_;                // arrival time of the bytes being processed
  RequestHead head_;             // of the header block being received; there is one at a time
  bool request_ = false;         // that block begins a request
  bool draining_ = false;
  bool drain_ended_ = false;
  bool acknowledged_ = false;          // the client has acknowledged the settings
  uint32_t unacknowledged_calls_ = 0;  // calls received before that
  Status wrong_;
  std::string complaint_;  // why Receive failed
  uint32_t complaint_error_ = NGHTTP2_ENHANCE_YOUR_CALM;
};

}  // namespace attend
