// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/region_client.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/server/support/await.h"

namespace attend::test {
namespace {

constexpr int64_t kAlign = 256;

int64_t Aligned(int64_t offset) { return (offset + kAlign - 1) / kAlign * kAlign; }

}  // namespace

MappedRegion::MappedRegion(std::string token, UniqueFd file, int64_t bytes)
    : token_(std::move(token)), file_(std::move(file)), bytes_(bytes) {
  void* const data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED,
                          file_.get(), 0);
  EXPECT_NE(data, MAP_FAILED);
  data_ = static_cast<char*>(data);
}

MappedRegion::~MappedRegion() { Unmap(); }

void MappedRegion::Unmap() {
  if (data_ != nullptr && file_.valid()) munmap(data_, static_cast<size_t>(bytes_));
  data_ = nullptr;
}

RegionClient::RegionClient(const std::string& path)
    : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  // A send or a receive that takes longer fails.
  const timeval most{.tv_sec = kWaitMost.count(), .tv_usec = 0};
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
  if (connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    socket_.Reset();
  }
}

bool RegionClient::Send(const std::string& packet) {
  return send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(packet.size());
}

bool RegionClient::SendWithFiles(const std::string& packet, int files) {
  std::string bytes = packet;
  iovec data{bytes.data(), bytes.size()};
  const std::vector<int> fds(static_cast<size_t>(files), socket_.get());
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  return sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

std::optional<v1::RegionReply> RegionClient::Receive(UniqueFd* file) {
  std::array<char, 4096> packet;
  iovec data{packet.data(), packet.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t bytes = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  EXPECT_TRUE(bytes >= 0 || errno != EAGAIN) << "no reply in " << kWaitMost.count() << " s";
  if (bytes <= 0) return std::nullopt;
  if (const cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof(fd));
    UniqueFd received(fd);
    if (file != nullptr) *file = std::move(received);
  }
  v1::RegionReply reply;
  EXPECT_TRUE(reply.ParseFromArray(packet.data(), static_cast<int>(bytes)));
  return reply;
}

v1::RegionReply RegionClient::Ask(const v1::RegionRequest& request, UniqueFd* file) {
  EXPECT_TRUE(Send(request.SerializeAsString()));
  std::optional<v1::RegionReply> reply = Receive(file);
  EXPECT_TRUE(reply.has_value()) << "the server closed the connection";
  return reply.value_or(v1::RegionReply());
}

v1::RegionReply RegionClient::TryCreate(uint64_t bytes) {
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(bytes);
  return Ask(request, nullptr);
}

std::unique_ptr<MappedRegion> RegionClient::Create(int64_t bytes) {
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(static_cast<uint64_t>(bytes));
  UniqueFd file;
  const v1::RegionReply reply = Ask(request, &file);
  EXPECT_TRUE(reply.has_created()) << reply.ShortDebugString();
  EXPECT_TRUE(file.valid());
  EXPECT_GE(static_cast<int64_t>(reply.created().bytes()), bytes);
  return std::make_unique<MappedRegion>(reply.created().token(), std::move(file),
                                        static_cast<int64_t>(reply.created().bytes()));
}

v1::RegionReply RegionClient::Release(const std::string& token) {
  v1::RegionRequest request;
  request.mutable_release()->set_token(token);
  return Ask(request, nullptr);
}

v1::RegionReply RegionClient::Import(const v1::ImportCudaMemory& lent) {
  v1::RegionRequest request;
  *request.mutable_import_cuda() = lent;
  return Ask(request, nullptr);
}

int64_t PutTensors(const MappedRegion& region, int64_t offset, v1::AttendRequest* request) {
  int raw = 0;
  for (v1::Tensor* tensor : {request->mutable_q(), request->mutable_k(), request->mutable_v(),
                             request->has_bias() ? request->mutable_bias() : nullptr}) {
    if (tensor == nullptr) continue;
    const std::string& bytes = request->raw(raw++);
    const int64_t size = static_cast<int64_t>(bytes.size());
    EXPECT_LE(offset + size, region.bytes());
    bytes.copy(region.data() + offset, bytes.size());
    tensor->mutable_shared_memory()->set_region(region.token());
    tensor->mutable_shared_memory()->set_offset(static_cast<uint64_t>(offset));
    offset = Aligned(offset + size);
  }
  request->clear_raw();
  return offset;
}

void PlaceOutputs(const MappedRegion& region, int64_t offset, int64_t o_bytes,
                  v1::AttendRequest* request) {
  v1::SharedMemory* o = request->mutable_o_placement()->mutable_shared_memory();
  o->set_region(region.token());
  o->set_offset(static_cast<uint64_t>(offset));
  if (!request->return_lse()) return;
  v1::SharedMemory* lse = request->mutable_lse_placement()->mutable_shared_memory();
  lse->set_region(region.token());
  lse->set_offset(static_cast<uint64_t>(Aligned(offset + o_bytes)));
}

v1::AttendResponse WithBytes(const MappedRegion& region, const v1::AttendResponse& response) {
  v1::AttendResponse whole = response;
  whole.clear_raw();
  int raw = 0;
  const auto add = [&](const v1::Tensor& tensor) {
    if (!tensor.has_shared_memory()) {
      EXPECT_LT(raw, response.raw_size());
      whole.add_raw(response.raw(raw++));
      return;
    }
    EXPECT_EQ(tensor.shared_memory().region(), region.token());
    EXPECT_LE(tensor.shared_memory().offset() + tensor.byte_length(),
              static_cast<uint64_t>(region.bytes()));
    whole.add_raw(region.data() + tensor.shared_memory().offset(), tensor.byte_length());
  };
  add(response.o());
  if (response.has_lse()) add(response.lse());
  EXPECT_EQ(raw, response.raw_size());
  return whole;
}

}  // namespace attend::test
