// SPDX-License-Identifier: Apache-2.0
//
// The server's end of one HTTP/2 connection, without its socket: bytes in, bytes out. libnghttp2
// beneath keeps the rules of HTTP/2; the bounds on what a client may ask for are here.
//
// One thread at a time. Send is called from none of the callbacks; all else may be. Callbacks come
// from within Receive and Send; the destructor calls none. A callback may throw std::bad_alloc,
// which ends the connection.
//
// The flow of a stream follows what its owner has consumed; that of the connection follows what has
// come, so that a stream that is not read keeps no other from going on. What streams may bring
// unread is therefore their number times their window.

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

// A stream of a session, which begins with its request and ends with OnClose.
class Http2Stream {
 public:
  virtual void OnData(std::string_view bytes) = 0;
  // Where the next bytes of OnData had best lie, as many as belong there. Empty: anywhere.
  virtual std::span<char> Room() const { return {}; }
  // The client sends no more.
  virtual void OnEnd() = 0;
  // So many bytes of `output` have gone to the connection's.
  virtual void OnTaken(size_t bytes) = 0;
  // It is over: because `trailers_sent`, or else the client reset it or the connection ended. The
  // session does not use the object any more.
  virtual void OnClose() = 0;

 protected:
  ~Http2Stream() = default;

  // Follows the headers. Http2Session::Resume after something was added.
  OutputQueue output{kBlockBytes};
  static constexpr size_t kBlockBytes = 256;  // enough for what announces a message

 private:
  friend class Http2Session;
  const CallMetadata* trailers_ = nullptr;  // that follow `output`
  bool deferred_ = false;                   // nghttp2 waits for Resume

 protected:
  bool trailers_sent = false;
};

class Http2Session {
 public:
  struct Limits {
    uint32_t streams_max = 1024;
    // A larger list refuses its call; eight times as much ends the connection.
    int64_t header_list_bytes_max = int64_t{8} << 10;
    int32_t stream_window_bytes = 1 << 20;
    int32_t connection_window_bytes = 16 << 20;
    uint32_t frame_bytes_max = 1 << 18;
    // From here on nothing is added to the output until some of it has left.
    size_t output_bytes_max = size_t{1} << 20;
    FrameRates rates;
  };
  // Which frames came that other servers refuse, or that say how a connection fares.
  struct Counts {
    int64_t padding_bytes = 0;
    int64_t frames = 0;
  };

  class Owner {
   public:
    // A request has begun on that stream. Null: it has been answered whole, or reset, and what its
    // client still sends is dropped. The head may be swapped for another that is to be used again.
    virtual Http2Stream* OnRequest(int32_t id, RequestHead&& head) = 0;
    // The client is told that it may send so many bytes more on a stream; on all, if the id is 0.
    virtual void OnGrant(int32_t id, int64_t bytes) = 0;

   protected:
    ~Owner() = default;
  };

  // The arguments must outlive the session.
  Http2Session(const Limits& limits, Owner& owner, const Clock& clock);
  ~Http2Session();
  Http2Session(const Http2Session&) = delete;
  Http2Session& operator=(const Http2Session&) = delete;

  // Takes what came. An error says what the client did wrong: then there may still be output that
  // tells it, after which the connection is over.
  Status Receive(std::string_view bytes);
  // Writes frames to `output`, up to its bound.
  Status Send();
  OutputQueue& output() { return output_; }
  bool wants_send() const { return nghttp2_session_want_write(session_) != 0; }
  // Nothing more comes or goes, once the output has left.
  bool over() const { return !wants_send() && nghttp2_session_want_read(session_) == 0; }

  // Not OK once the client has been told by a GOAWAY that it did what it may not.
  const Status& wrong() const { return wrong_; }

  // Begins the answer on a stream that is open, with headers behind those that come first.
  void Respond(int32_t id, Http2Stream& stream, const CallMetadata& headers,
               std::span<const ConstantHeader> first = {});
  // The stream's `output` has grown.
  void Resume(int32_t id, Http2Stream& stream);
  // Ends the answer after what `output` has. The trailers must outlive the stream.
  void End(int32_t id, Http2Stream& stream, const CallMetadata& trailers);
  // Ends a stream that has no answer so far: all in one frame.
  void RespondWhole(int32_t id, const CallMetadata& headers,
                    std::span<const ConstantHeader> first = {});
  void Reset(int32_t id, uint32_t error_code);
  // So many bytes of what a stream brought are no longer kept: the client may send as many more.
  void Consume(int32_t id, size_t bytes);

  // Asks the client to open no more streams. Those that cross this on their way are served.
  void Drain();
  // Refuses further streams from now on, which Drain by itself does once the client has answered.
  void EndDrain();
  // Ends the connection, streams and all, once this has been sent.
  void Terminate(uint32_t error_code);

  const Counts& counts() const { return counts_; }
  // Where the bytes that come next had best be read to, if they are a stream's: no more than are
  // left of their frame. Empty: anywhere.
  std::span<char> Room() const;
  // The length of the newest frame of data.
  size_t data_frame_bytes() const { return data_frame_bytes_; }

 private:
  struct Callbacks;

  // The frame that begins. False: there is a complaint.
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
  Owner& owner_;
  const Clock& clock_;
  Http2Memory memory_;
  nghttp2_session* session_ = nullptr;
  OutputQueue output_;
  FrameCutter frames_;
  // The frame that is coming resets a stream that has not begun. To RFC 9113 (5.1) and nghttp2 that
  // is an error of the connection, and so of all other calls on it. But gRPC's clients and Envoy
  // send it for a call that is cancelled before its headers have left, and gRPC's servers ignore
  // it.
  bool left_out_ = false;
  FrameBudget budget_;
  Counts counts_;
  size_t data_frame_bytes_ = 0;
  TimePoint now_;         // when what is received now came
  RequestHead head_;      // of the block that is coming: there is one at a time
  bool request_ = false;  // that block begins a request
  bool draining_ = false;
  bool acknowledged_ = false;          // the client has, the settings
  uint32_t unacknowledged_calls_ = 0;  // before it had
  Status wrong_;
  std::string complaint_;  // that ended Receive
  uint32_t complaint_error_ = NGHTTP2_ENHANCE_YOUR_CALM;
};

}  // namespace attend
