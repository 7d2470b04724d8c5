// SPDX-License-Identifier: Apache-2.0

#include "server/transport/channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>

namespace attend {
namespace {

constexpr size_t kVectorsMax = 64;  // per system call

}  // namespace

int64_t Channel::round_trip_us() const {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  const int known = getsockopt(socket(), IPPROTO_TCP, TCP_INFO, &info, &bytes);
  return known == 0 ? int64_t{info.tcpi_rtt} : 0;
}

ssize_t PlainChannel::Read(std::span<char> buffer, std::span<char> /*scratch*/) {
  return recv(socket(), buffer.data(), buffer.size(), 0);
}

ssize_t PlainChannel::ReadTo(std::span<char> place, std::span<char> buffer) {
  const std::array<iovec, 2> vectors = {
      {{place.data(), place.size()}, {buffer.data(), buffer.size()}}};
  return readv(socket(), vectors.data(), vectors.size());
}

ssize_t PlainChannel::Write(const OutputQueue& output, std::span<char> /*scratch*/) {
  std::array<iovec, kVectorsMax> vectors;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = output.Fill(vectors);
  return sendmsg(socket(), &message, MSG_NOSIGNAL);
}

}  // namespace attend
