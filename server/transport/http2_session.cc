// SPDX-License-Identifier: Apache-2.0

#include "server/transport/http2_session.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

namespace attend {
namespace {

constexpr int64_t kHardHeaderFactor = 8;
constexpr int32_t kStreamMax = 0x7fffffff;
constexpr size_t kFrameHeadBytes = 9;
constexpr size_t kResetBytes = 4;
constexpr std::string_view kDrainPing = "draining";  // every ping has eight bytes

std::string_view View(const uint8_t* data, size_t bytes) {
  return {reinterpret_cast<const char*>(data), bytes};
}

}  // namespace

// Callbacks for nghttp2. No exception may pass through it.
struct Http2Session::Callbacks {
  template <class F>
  static int Guard(Http2Session& self, const F& function) {
    try {
      return function();
    } catch (const std::bad_alloc&) {
      self.complaint_ = "no memory";  // short enough to need no allocation
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
  }
  static Http2Session& Of(void* user) { return *static_cast<Http2Session*>(user); }

  static int OnBeginHeaders(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return Guard(Of(user), [&] { return Of(user).BeginHeaders(*frame); });
  }
  static int OnHeader(nghttp2_session*, const nghttp2_frame*, const uint8_t* name,
                      size_t name_bytes, const uint8_t* value, size_t value_bytes, uint8_t,
                      void* user) {
    return Guard(Of(user), [&] {
      return Of(user).AddHeader(View(name, name_bytes), View(value, value_bytes));
    });
  }
  static int OnData(nghttp2_session* session, uint8_t, int32_t id, const uint8_t* data,
                    size_t bytes, void* user) {
    return Guard(Of(user), [&]() -> int {
      nghttp2_session_consume_connection(session, bytes);
      if (Http2Stream* const stream = Of(user).Find(id)) {
        stream->OnData(View(data, bytes));
      } else {
        nghttp2_session_consume_stream(session, id, bytes);
      }
      return 0;
    });
  }
  static int OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return Guard(Of(user), [&]() -> int {
      Of(user).EndFrame(*frame);
      return Of(user).complaint_.empty() ? 0 : int{NGHTTP2_ERR_CALLBACK_FAILURE};
    });
  }
  static int OnClose(nghttp2_session* session, int32_t id, uint32_t, void* user) {
    return Guard(Of(user), [&]() -> int {
      if (Http2Stream* const stream = Of(user).Find(id)) {
        nghttp2_session_set_stream_user_data(session, id, nullptr);
        stream->OnClose();
      }
      return 0;
    });
  }
  static int OnSent(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return Guard(Of(user), [&]() -> int { return Of(user).Sent(*frame), 0; });
  }
  static ssize_t Write(nghttp2_session*, const uint8_t* data, size_t bytes, int, void* user) {
    Http2Session& self = Of(user);
    if (self.output_.size() >= self.limits_.output_bytes_max) return NGHTTP2_ERR_WOULDBLOCK;
    const int status =
        Guard(self, [&]() -> int { return self.output_.Copy(View(data, bytes)), 0; });
    return status == 0 ? static_cast<ssize_t>(bytes) : status;
  }
  static ssize_t FrameBytes(nghttp2_session*, uint8_t, int32_t, int32_t session_window,
                            int32_t stream_window, uint32_t remote_frame_bytes_max, void* user) {
    const int64_t most =
        std::min<int64_t>(remote_frame_bytes_max, Of(user).limits_.frame_bytes_max);
    return std::max<ssize_t>(1, std::min<int64_t>({session_window, stream_window, most}));
  }
  static ssize_t Read(nghttp2_session*, int32_t id, uint8_t*, size_t bytes_max, uint32_t* flags,
                      nghttp2_data_source* source, void* user) {
    try {
      return Of(user).ReadOutput(id, *static_cast<Http2Stream*>(source->ptr), bytes_max, *flags);
    } catch (const std::bad_alloc&) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
  }
  static int WriteData(nghttp2_session*, nghttp2_frame* frame, const uint8_t* head, size_t bytes,
                       nghttp2_data_source* source, void* user) {
    Http2Session& self = Of(user);
    if (self.output_.size() >= self.limits_.output_bytes_max) return NGHTTP2_ERR_WOULDBLOCK;
    return Guard(self, [&]() -> int {
      auto& stream = *static_cast<Http2Stream*>(source->ptr);
      self.output_.Copy(View(head, kFrameHeadBytes));
      stream.output.MoveTo(self.output_, bytes);
      self.budget_.CountSent(static_cast<int64_t>(bytes));
      (void)frame;  // without padding, as none was requested
      if (bytes > 0) stream.OnTaken(bytes);
      return 0;
    });
  }
};

Http2Session::Http2Session(const Limits& limits, Owner& owner, const Clock& clock)
    : limits_(limits),
      window_bytes_(limits.connection_window_bytes),
      owner_(owner),
      clock_(clock),
      budget_(limits.rates),
      now_(clock.Now()) {
  nghttp2_session_callbacks* calls = nullptr;
  nghttp2_option* option = nullptr;
  if (nghttp2_session_callbacks_new(&calls) != 0 || nghttp2_option_new(&option) != 0) {
    nghttp2_session_callbacks_del(calls);
    throw std::bad_alloc();
  }
  nghttp2_session_callbacks_set_on_begin_headers_callback(calls, Callbacks::OnBeginHeaders);
  nghttp2_session_callbacks_set_on_header_callback(calls, Callbacks::OnHeader);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(calls, Callbacks::OnData);
  nghttp2_session_callbacks_set_on_frame_recv_callback(calls, Callbacks::OnFrame);
  nghttp2_session_callbacks_set_on_stream_close_callback(calls, Callbacks::OnClose);
  nghttp2_session_callbacks_set_on_frame_send_callback(calls, Callbacks::OnSent);
  nghttp2_session_callbacks_set_send_callback(calls, Callbacks::Write);
  nghttp2_session_callbacks_set_send_data_callback(calls, Callbacks::WriteData);
  nghttp2_session_callbacks_set_data_source_read_length_callback(calls, Callbacks::FrameBytes);
  nghttp2_option_set_no_auto_window_update(option, 1);
  nghttp2_option_set_no_closed_streams(option, 1);
  nghttp2_option_set_max_continuations(option, FrameBudget::kContinuationsMax);
  // The frame budget bounds resets; nghttp2's own limit is far below what honest clients cancel.
  nghttp2_option_set_stream_reset_rate_limit(option, limits.rates.resets.burst,
                                             limits.rates.resets.per_second);
  nghttp2_mem memory = memory_.Functions();
  const int made = nghttp2_session_server_new3(&session_, calls, this, option, &memory);
  nghttp2_session_callbacks_del(calls);
  nghttp2_option_del(option);
  if (made != 0) throw std::bad_alloc();
  const std::array<nghttp2_settings_entry, 4> settings = {
      {{NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, limits.streams_max},
       {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, static_cast<uint32_t>(limits.stream_window_bytes)},
       {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, limits.frame_bytes_max},
       {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE,
        static_cast<uint32_t>(limits.header_list_bytes_max)}}};
  if (nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size()) != 0 ||
      nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0,
                                            limits.connection_window_bytes) != 0) {
    nghttp2_session_del(session_);
    throw std::bad_alloc();
  }
}

Http2Session::~Http2Session() { nghttp2_session_del(session_); }

Status Http2Session::Receive(std::string_view bytes) {
  now_ = clock_.Now();
  ssize_t taken = 0;
  for (std::string_view part = frames_.Next(bytes); !part.empty() && taken >= 0;
       part = frames_.Next(bytes)) {
    if (frames_.begins() && !JudgeFrame()) {
      taken = NGHTTP2_ERR_CALLBACK_FAILURE;
    } else if (!left_out_) {
      taken = nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(part.data()),
                                       part.size());
    }
  }
  if (taken >= 0) return Status();
  if (!complaint_.empty()) {
    Terminate(complaint_error_);
    return complaint_error_ == NGHTTP2_PROTOCOL_ERROR ? InvalidArgument(complaint_)
                                                      : ResourceExhausted(complaint_);
  }
  return InvalidArgument(std::string("the connection does not speak HTTP/2: ") +
                         nghttp2_strerror(static_cast<int>(taken)));
}

Status Http2Session::Send() {
  const int sent = nghttp2_session_send(session_);
  if (sent == 0) return Status();
  return Internal(std::string("frames cannot be written: ") + nghttp2_strerror(sent));
}

Http2Stream* Http2Session::Find(int32_t id) const {
  return static_cast<Http2Stream*>(nghttp2_session_get_stream_user_data(session_, id));
}

std::span<char> Http2Session::Room() const {
  const nghttp2_frame_hd& head = frames_.head();
  // The first bytes of a padded frame are not the stream's.
  const bool plain = head.type == NGHTTP2_DATA && (head.flags & NGHTTP2_FLAG_PADDED) == 0;
  const Http2Stream* const stream = plain && frames_.left() > 0 ? Find(head.stream_id) : nullptr;
  if (stream == nullptr) return {};
  const std::span<char> room = stream->Room();
  return room.first(std::min(room.size(), frames_.left()));
}

bool Http2Session::JudgeFrame() {
  const nghttp2_frame_hd& head = frames_.head();
  ++frame_count_;
  if (head.type == NGHTTP2_DATA) data_frame_bytes_ = head.length;
  left_out_ = head.type == NGHTTP2_RST_STREAM && head.length == kResetBytes &&
              head.stream_id % 2 == 1 && head.stream_id > budget_.newest_stream();
  if (!budget_.Count(head, now_)) {
    Complain("frames of type " + std::to_string(head.type) +
             " came faster than a connection may send them");
    return false;
  }
  if (head.type != NGHTTP2_HEADERS || !budget_.MayBeLeftOut(head.stream_id) ||
      nghttp2_session_find_stream(session_, head.stream_id) != nullptr) {
    return true;
  }
  // nghttp2 drops it, as it does trailers of a stream that has been reset.
  Complain("a call began on stream " + std::to_string(head.stream_id) +
               " after a later stream had begun",
           NGHTTP2_PROTOCOL_ERROR);
  return false;
}

int Http2Session::BeginHeaders(const nghttp2_frame& frame) {
  head_.Clear();
  request_ = frame.headers.cat == NGHTTP2_HCAT_REQUEST;
  if (!request_) return 0;
  budget_.CountCall();
  if (acknowledged_ || ++unacknowledged_calls_ <= limits_.streams_max) return 0;
  Complain("more calls began than the settings allow, which the client has not acknowledged");
  return NGHTTP2_ERR_CALLBACK_FAILURE;
}

int Http2Session::AddHeader(std::string_view name, std::string_view value) {
  // The client's trailers are only counted, not kept.
  head_.Add(name, value, request_ ? limits_.header_list_bytes_max : 0);
  const int64_t most = limits_.header_list_bytes_max * kHardHeaderFactor;
  if (head_.list_bytes <= most) return 0;
  Complain("the headers of a call have more than " + std::to_string(most) + " bytes");
  return NGHTTP2_ERR_CALLBACK_FAILURE;
}

void Http2Session::EndFrame(const nghttp2_frame& frame) {
  switch (frame.hd.type) {
    case NGHTTP2_HEADERS:
      return EndHeaders(frame);
    case NGHTTP2_DATA: {
      const bool ends = (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
      if (frame.data.padlen > 0) {
        const auto left = static_cast<int64_t>(frame.hd.length - frame.data.padlen);
        if (!ends && left < FrameBudget::kSmallBytes && !budget_.Empty(now_)) {
          return Complain("more padding frames came than a connection may send");
        }
      }
      Http2Stream* const stream = ends ? Find(frame.hd.stream_id) : nullptr;
      if (stream != nullptr) stream->OnEnd();
      return;
    }
    case NGHTTP2_PING: {
      const bool ours = (frame.hd.flags & NGHTTP2_FLAG_ACK) != 0 &&
                        View(frame.ping.opaque_data, sizeof frame.ping.opaque_data) == kDrainPing;
      if (draining_ && ours) EndDrain();
      return;
    }
    case NGHTTP2_SETTINGS:
      acknowledged_ |= (frame.hd.flags & NGHTTP2_FLAG_ACK) != 0;
      return;
    default:
      break;
  }
}

void Http2Session::EndHeaders(const nghttp2_frame& frame) {
  const int32_t id = frame.hd.stream_id;
  if (frame.headers.cat == NGHTTP2_HCAT_REQUEST) {
    Http2Stream* const stream = owner_.OnRequest(id, std::move(head_));
    if (stream == nullptr) return;
    nghttp2_session_set_stream_user_data(session_, id, stream);
  }
  if ((frame.hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) return;
  if (Http2Stream* const stream = Find(id)) stream->OnEnd();
}

ssize_t Http2Session::ReadOutput(int32_t id, Http2Stream& stream, size_t bytes_max,
                                 uint32_t& flags) {
  const size_t bytes = std::min(bytes_max, stream.output.size());
  const bool ends = stream.trailers_ != nullptr && bytes == stream.output.size();
  if (bytes == 0 && !ends) {
    stream.deferred_ = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  flags |= NGHTTP2_DATA_FLAG_NO_COPY;
  if (ends) {
    flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    const HeaderBlock block(*stream.trailers_);
    if (nghttp2_submit_trailer(session_, id, block.data(), block.size()) != 0) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
  }
  return static_cast<ssize_t>(bytes);
}

void Http2Session::Sent(const nghttp2_frame& frame) {
  if (frame.hd.type == NGHTTP2_GOAWAY && frame.goaway.error_code != NGHTTP2_NO_ERROR) {
    wrong_ = InvalidArgument(std::string("the client violated HTTP/2: ") +
                             nghttp2_http2_strerror(frame.goaway.error_code));
  } else if (frame.hd.type == NGHTTP2_GOAWAY && frame.goaway.last_stream_id == kStreamMax) {
    // Its acknowledgement arrives once the client knows. Sent any sooner, the ping would overtake
    // the notice.
    nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE,
                        reinterpret_cast<const uint8_t*>(kDrainPing.data()));
  }
  const bool ends = (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (frame.hd.type != NGHTTP2_HEADERS || !ends) return;
  const int32_t id = frame.hd.stream_id;
  if (Http2Stream* const stream = Find(id)) stream->trailers_sent = true;
  // The client need not send the rest. Sent any sooner, this would overtake the trailers.
  if (nghttp2_session_get_stream_remote_close(session_, id) != 0) return;
  budget_.CountEarlyEnd(limits_.stream_window_bytes);
  Reset(id, NGHTTP2_NO_ERROR);
}

void Http2Session::Respond(int32_t id, Http2Stream& stream, const CallMetadata& headers,
                           std::span<const ConstantHeader> first) {
  nghttp2_data_provider provider{};
  provider.source.ptr = &stream;
  provider.read_callback = Callbacks::Read;
  const HeaderBlock block(headers, first);
  nghttp2_submit_response(session_, id, block.data(), block.size(), &provider);
}

void Http2Session::Resume(int32_t id, Http2Stream& stream) {
  if (!std::exchange(stream.deferred_, false)) return;
  nghttp2_session_resume_data(session_, id);
}

void Http2Session::End(int32_t id, Http2Stream& stream, const CallMetadata& trailers) {
  stream.trailers_ = &trailers;
  Resume(id, stream);
}

void Http2Session::RespondWhole(int32_t id, const CallMetadata& headers,
                                std::span<const ConstantHeader> first) {
  const HeaderBlock block(headers, first);
  nghttp2_submit_response(session_, id, block.data(), block.size(), nullptr);
}

void Http2Session::Reset(int32_t id, uint32_t error_code) {
  nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, error_code);
}

void Http2Session::Consume(int32_t id, size_t bytes) {
  nghttp2_session_consume_stream(session_, id, bytes);
}

Status Http2Session::SetWindow(int32_t bytes) {
  if (std::exchange(window_bytes_, bytes) == bytes) return Status();
  const int set = nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, bytes);
  return set == 0 ? Status() : ResourceExhausted("no memory for a window's update");
}

void Http2Session::Drain() {
  if (std::exchange(draining_, true)) return;
  nghttp2_submit_shutdown_notice(session_);
}

void Http2Session::EndDrain() {
  if (std::exchange(drain_ended_, true)) return;
  // Streams that the client began before it knew have arrived by now.
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                        nullptr, 0);
}

void Http2Session::Terminate(uint32_t error_code) {
  nghttp2_session_terminate_session(session_, error_code);
}

}  // namespace attend
