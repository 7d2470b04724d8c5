// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/http2_client.h"

#include <algorithm>
#include <cstring>

namespace attend {
namespace {

nghttp2_nv Entry(std::string_view name, std::string_view value) {
  const auto bytes = [](std::string_view text) {
    return reinterpret_cast<uint8_t*>(const_cast<char*>(text.data()));
  };
  return {bytes(name), bytes(value), name.size(), value.size(), NGHTTP2_NV_FLAG_NONE};
}

}  // namespace

std::string Framed(std::string_view message, bool compressed) {
  const auto size = static_cast<uint32_t>(message.size());
  std::string bytes = {compressed ? '\1' : '\0', static_cast<char>(size >> 24),
                       static_cast<char>(size >> 16), static_cast<char>(size >> 8),
                       static_cast<char>(size)};
  return bytes.append(message);
}

struct Http2Client::Sending {
  std::string bytes;
  bool ends = false;
  bool deferred = false;
};

std::vector<std::string> Http2Client::Answer::Messages() const {
  std::vector<std::string> messages;
  std::string_view left = body;
  while (left.size() >= 5) {
    uint32_t size = 0;
    for (int i = 1; i < 5; ++i) size = size << 8 | static_cast<uint8_t>(left[i]);
    if (left.size() < 5 + size_t{size}) break;
    messages.emplace_back(left.substr(5, size));
    left.remove_prefix(5 + size_t{size});
  }
  return messages;
}

int Http2Client::Answer::Status() const {
  for (const auto* all : {&trailers, &headers}) {
    const auto found = all->find("grpc-status");
    if (found != all->end()) return std::stoi(found->second);
  }
  return -1;
}

std::string Http2Client::Answer::Message() const {
  for (const auto* all : {&trailers, &headers}) {
    const auto found = all->find("grpc-message");
    if (found != all->end()) return found->second;
  }
  return "";
}

struct Http2Client::Callbacks {
  static Http2Client& Of(void* user) { return *static_cast<Http2Client*>(user); }

  static int OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                      size_t name_bytes, const uint8_t* value, size_t value_bytes, uint8_t,
                      void* user) {
    Answer& answer = Of(user).answers_[frame->hd.stream_id];
    auto& to = frame->headers.cat == NGHTTP2_HCAT_RESPONSE ? answer.headers : answer.trailers;
    to[std::string(reinterpret_cast<const char*>(name), name_bytes)] =
        std::string(reinterpret_cast<const char*>(value), value_bytes);
    return 0;
  }
  static int OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t bytes,
                    void* user) {
    Of(user).answers_[id].body.append(reinterpret_cast<const char*>(data), bytes);
    return 0;
  }
  static int OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    Http2Client& self = Of(user);
    self.frames_.push_back(frame->hd.type);
    const bool data = frame->hd.type == NGHTTP2_DATA || frame->hd.type == NGHTTP2_HEADERS;
    if (data && (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0) {
      self.answers_[frame->hd.stream_id].ended = true;
    }
    if (frame->hd.type == NGHTTP2_GOAWAY) {
      self.goaways_.emplace_back(frame->goaway.last_stream_id, frame->goaway.error_code);
    }
    const bool ack = (frame->hd.flags & NGHTTP2_FLAG_ACK) != 0;
    self.pings_answered_ += frame->hd.type == NGHTTP2_PING && ack ? 1 : 0;
    return 0;
  }
  static int OnClose(nghttp2_session*, int32_t id, uint32_t error, void* user) {
    Answer& answer = Of(user).answers_[id];
    answer.closed = true;
    answer.error = error;
    return 0;
  }
  static ssize_t Padding(nghttp2_session*, const nghttp2_frame* frame, size_t most, void* user) {
    return static_cast<ssize_t>(std::min(most, frame->hd.length + Of(user).padding_bytes_));
  }
  static ssize_t Read(nghttp2_session*, int32_t, uint8_t* to, size_t most, uint32_t* flags,
                      nghttp2_data_source* source, void*) {
    auto& sending = *static_cast<Sending*>(source->ptr);
    const size_t bytes = std::min(most, sending.bytes.size());
    if (bytes == 0 && !sending.ends) {
      sending.deferred = true;
      return NGHTTP2_ERR_DEFERRED;
    }
    memcpy(to, sending.bytes.data(), bytes);
    sending.bytes.erase(0, bytes);
    if (sending.bytes.empty() && sending.ends) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return static_cast<ssize_t>(bytes);
  }
};

Http2Client::Http2Client(bool grants_windows) {
  nghttp2_session_callbacks* calls = nullptr;
  nghttp2_option* option = nullptr;
  nghttp2_session_callbacks_new(&calls);
  nghttp2_option_new(&option);
  nghttp2_session_callbacks_set_on_header_callback(calls, Callbacks::OnHeader);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(calls, Callbacks::OnData);
  nghttp2_session_callbacks_set_on_frame_recv_callback(calls, Callbacks::OnFrame);
  nghttp2_session_callbacks_set_on_stream_close_callback(calls, Callbacks::OnClose);
  nghttp2_session_callbacks_set_select_padding_callback(calls, Callbacks::Padding);
  nghttp2_option_set_no_auto_window_update(option, grants_windows ? 0 : 1);
  nghttp2_option_set_no_http_messaging(option, 1);  // so that it may send invalid frames
  nghttp2_session_client_new2(&session_, calls, this, option);
  nghttp2_session_callbacks_del(calls);
  nghttp2_option_del(option);
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, nullptr, 0);
}

Http2Client::~Http2Client() { nghttp2_session_del(session_); }

int32_t Http2Client::Begin(std::string_view path, const Headers& more, bool ends) {
  Headers headers = {{":method", "POST"},          {":scheme", "http"},
                     {":path", std::string(path)}, {":authority", "test"},
                     {"te", "trailers"},           {"content-type", "application/grpc"}};
  headers.insert(headers.end(), more.begin(), more.end());
  return BeginAs(headers, ends);
}

int32_t Http2Client::BeginAs(const Headers& headers, bool ends) {
  std::vector<nghttp2_nv> block;
  block.reserve(headers.size());
  for (const auto& [name, value] : headers) block.push_back(Entry(name, value));
  auto sending = std::make_unique<Sending>();
  nghttp2_data_provider provider{};
  provider.source.ptr = sending.get();
  provider.read_callback = Callbacks::Read;
  const int32_t id = nghttp2_submit_request(session_, nullptr, block.data(), block.size(),
                                            ends ? nullptr : &provider, nullptr);
  sending_[id] = std::move(sending);
  return id;
}

void Http2Client::Send(int32_t id, std::string_view bytes, bool ends) {
  Sending& sending = *sending_[id];
  sending.bytes.append(bytes);
  sending.ends = ends;
  if (std::exchange(sending.deferred, false)) nghttp2_session_resume_data(session_, id);
}

void Http2Client::Reset(int32_t id, uint32_t error) {
  nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, error);
}

void Http2Client::Ping() { nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE, nullptr); }

void Http2Client::Grant(int32_t id, int32_t bytes) {
  nghttp2_submit_window_update(session_, NGHTTP2_FLAG_NONE, id, bytes);
}

std::string Http2Client::Output() {
  std::string output;
  for (;;) {
    const uint8_t* data = nullptr;
    const ssize_t bytes = nghttp2_session_mem_send(session_, &data);
    if (bytes <= 0) return output;
    output.append(reinterpret_cast<const char*>(data), static_cast<size_t>(bytes));
  }
}

bool Http2Client::Receive(std::string_view bytes) {
  return nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(bytes.data()),
                                  bytes.size()) >= 0;
}

uint32_t Http2Client::streams_max() const {
  return nghttp2_session_get_remote_settings(session_, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS);
}

}  // namespace attend
