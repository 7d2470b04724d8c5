// SPDX-License-Identifier: Apache-2.0
//
// A poll loop over SOCK_SEQPACKET sockets: one packet is one request, answered before the next is
// read. Requests that must wait are kept in the connection and retried when the registry closes
// memory; replies that cannot be sent end the connection, so that no region exists that its client
// does not know of.

#include "server/regions/region_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"
#include "server/auth/caller.h"
#include "server/util/assign.h"
#include "server/util/wipe.h"

namespace attend {
namespace {

constexpr size_t kPacketBytesMax = 4096;

v1::RegionReply ErrorReply(const Status& status) {
  v1::RegionReply reply;
  reply.mutable_error()->set_code(static_cast<int32_t>(status.code()));
  reply.mutable_error()->set_message(status.message());
  return reply;
}

// Sends one packet, with `file` if it is valid. Returns 0 or errno: the client does not read
// (EAGAIN) or has disconnected (EPIPE, ECONNRESET).
int Send(int socket, const v1::RegionReply& reply, const UniqueFd& file) {
  std::string bytes = reply.SerializeAsString();
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (file.valid()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = file.get();
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

}  // namespace

RegionSocket::RegionSocket(const Options& options, RegionRegistry& registry, Logger& logger,
                           const Clock& clock)
    : options_(options),
      registry_(registry),
      logger_(logger),
      clock_(clock),
      places_(options.connections_max, options.tenant_weights) {}

Result<std::unique_ptr<RegionSocket>> RegionSocket::Start(const Options& options,
                                                          RegionRegistry& registry, Logger& logger,
                                                          const Clock& clock) {
  std::unique_ptr<RegionSocket> socket(new RegionSocket(options, registry, logger, clock));
  UnixListenOptions listen;
  listen.path = options.path;
  listen.name = "shared-memory-socket " + options.path;
  listen.type = SOCK_SEQPACKET;
  listen.mode = options.any_user ? 0666 : 0600;
  listen.own_folder = true;
  ATTEND_RETURN_IF_ERROR(Assign(socket->listener_, ListenAt(listen)));
  socket->wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  socket->done_->wake = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket->wake_.valid() || !socket->done_->wake.valid()) {
    return Internal("cannot create an eventfd for the shared-memory socket");
  }
  registry.OnClosed([done = socket->done_] { eventfd_write(done->wake.get(), 1); });
  socket->thread_ = std::thread([raw = socket.get()] { raw->Run(); });
  return socket;
}

RegionSocket::~RegionSocket() { Stop(); }

bool RegionSocket::Stop(TimePoint until) {
  if (!thread_.joinable()) {
    if (listener_.socket.valid()) StopListening(&listener_);  // the thread was never started
    return true;
  }
  eventfd_write(wake_.get(), 1);
  {
    const MutexLock lock(mutex_);
    while (!ended_ && clock_.WaitUntil(changed_, mutex_, until)) {
    }
    if (!ended_) return false;
  }
  thread_.join();
  return true;
}

void RegionSocket::Run() {
  NameThread("attend-socket");
  std::vector<pollfd> polled;
  for (bool woken = false;;) {
    EndRevoked();
    const TimePoint next = std::min(Retry(woken), EndLate());
    polled.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    polled.push_back({listener_.socket.get(), static_cast<short>(accepting_ ? POLLIN : 0), 0});
    polled.push_back({done_->wake.get(), POLLIN, 0});
    for (const auto& [fd, connection] : connections_) {
      // A connection that waits for an answer is polled only for hang-up.
      polled.push_back({fd, static_cast<short>(connection.busy() ? 0 : POLLIN), 0});
    }
    const int ready = poll(polled.data(), polled.size(), PollTime(next));
    woken = ready > 0 && polled[2].revents != 0;
    accepting_ = true;
    if (ready < 0) continue;  // EINTR
    if (polled[0].revents != 0) break;
    for (size_t i = 3; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const auto found = connections_.find(polled[i].fd);
      if (found == connections_.end()) continue;  // displaced by one before it
      if (found->second.busy()) {
        End(found);
      } else {
        Serve(found);
      }
    }
    if (woken) {
      AnswerReleases();
      FinishEnded();
    }
    if (polled[1].revents != 0) Accept();
  }
  StopListening(&listener_);
  for (const auto& [fd, connection] : connections_) {
    registry_.RemoveClient(connection.client, Pages::kKept);
  }
  connections_.clear();
  const MutexLock lock(mutex_);
  ended_ = true;
  changed_.NotifyAll();
}

void RegionSocket::EndWith(Connections::iterator connection, const Status& status) {
  Connection& ended = connection->second;
  Send(connection->first, Refuse(ended.client, status), UniqueFd());
  ended.ended = true;
  ended.releasing = false;
  ended.wait.reset();
  std::erase(waiting_, connection->first);
  Finish(connection);
}

void RegionSocket::Accept() {
  for (;;) {
    UniqueFd socket(
        accept4(listener_.socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Otherwise the listener would stay readable and this thread would spin.
      accepting_ = errno == EAGAIN || errno == EWOULDBLOCK;
      return;
    }
    const Result<uid_t> user = CheckPeer(socket.get());
    Status status = user.ok() ? Status() : user.status();
    CountHold place;
    if (status.ok() && !options_.identify) status = TakePlace(SharedRegion::kAnyTenant, place);
    if (!status.ok()) {
      logger_.Log(LogLevel::warn, "shared memory client refused", {{"error", status.message()}});
      Send(socket.get(), ErrorReply(status), UniqueFd());
      continue;
    }
    const int fd = socket.get();
    const uint64_t client = options_.identify ? 0 : registry_.AddClient(SharedRegion::kAnyTenant);
    Connection made{std::move(socket), client, *user};
    made.since = clock_.Now();
    made.place = std::move(place);
    connections_.emplace(fd, std::move(made));
    logger_.Log(LogLevel::debug, "shared memory client connected", {{"client", client}});
  }
}

void RegionSocket::Serve(Connections::iterator connection) {
  std::array<char, kPacketBytesMax> packet;
  iovec data{packet.data(), packet.size()};
  msghdr message{};  // without room for descriptors: the kernel drops received ones
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  const ssize_t bytes = recvmsg(connection->first, &message, MSG_TRUNC);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (bytes <= 0) return End(connection);
  v1::RegionRequest request;
  Status malformed;
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    malformed = InvalidArgument("the packet carries descriptors, must carry none");
  } else if (bytes > static_cast<ssize_t>(packet.size()) ||
             !request.ParseFromArray(packet.data(), static_cast<int>(bytes))) {
    malformed = InvalidArgument("the packet of " + std::to_string(bytes) +
                                " bytes is not a RegionRequest of at most " +
                                std::to_string(kPacketBytesMax));
  }
  if (malformed.ok()) {
    ServePacket(connection, request);
    if (request.has_identify()) Wipe(*request.mutable_identify()->mutable_token());
    return;
  }
  // Lent memory must be closed before the connection.
  if (registry_.Lends(connection->second.client)) {
    if (!connection->second.ended) EndWith(connection, malformed);
    return;
  }
  Send(connection->first, ErrorReply(malformed), UniqueFd());
  End(connection);
}

void RegionSocket::ServePacket(Connections::iterator connection, const v1::RegionRequest& request) {
  Connection& from = connection->second;
  if (from.ended) {
    // It may still release regions, but gets no replies.
    static_cast<void>(registry_.Release(from.client, request.release().token()));
    return Finish(connection);
  }
  if (const Status known = Recheck(from); !known.ok()) {
    // The client will not repeat this release.
    static_cast<void>(registry_.Release(from.client, request.release().token()));
    return EndWith(connection, known);
  }
  UniqueFd file;
  const std::optional<v1::RegionReply> reply = Answer(from, request, file);
  if (reply) Reply(connection, *reply, file);
}

void RegionSocket::Reply(Connections::iterator connection, const v1::RegionReply& reply,
                         const UniqueFd& file) {
  const int error = Send(connection->first, reply, file);
  if (error == 0) return;
  if (error == EPIPE || error == ECONNRESET) return End(connection);
  // The client will never learn of a region in the reply.
  static_cast<void>(registry_.Release(connection->second.client, reply.created().token()));
  if (error == ETOOMANYREFS && file.valid()) {  // other processes do not receive theirs
    return Reply(connection, Refuse(connection->second.client,
                                    ResourceExhausted("the region's descriptor cannot be sent: " +
                                                      std::string(std::strerror(error)))));
  }
  EndWith(connection, ResourceExhausted("the reply cannot be sent, so the connection is closed: " +
                                        std::string(std::strerror(error))));
}

std::optional<v1::RegionReply> RegionSocket::Answer(Connection& connection,
                                                    const v1::RegionRequest& request,
                                                    UniqueFd& file) {
  const uint64_t client = connection.client;
  if (request.has_identify()) return Identify(connection, request.identify());
  if (client == 0) {
    if (options_.on_nobody) options_.on_nobody();
    return Refuse(client, Status(kUnauthenticated,
                                 "no token: the connection's first packet must be identify"));
  }
  TimePoint until = {};
  v1::RegionReply reply;
  switch (request.request_case()) {
    case v1::RegionRequest::kCreate:
      reply = Create(client, request.create(), file, until);
      break;
    case v1::RegionRequest::kImportCuda:
      reply = Import(client, request.import_cuda(), until);
      break;
    case v1::RegionRequest::kRelease:
      return Release(connection, request.release().token());
    case v1::RegionRequest::kIdentify:  // handled above
    case v1::RegionRequest::REQUEST_NOT_SET:
      return ErrorReply(
          Status(Code::kUnimplemented, "the request must be create, release or import_cuda"));
  }
  if (until == TimePoint()) return reply;
  connection.wait = {request, until};
  waiting_.push_back(connection.socket.get());
  return std::nullopt;
}

TimePoint RegionSocket::Retry(bool room) {
  TimePoint next = kNever;
  const TimePoint now = clock_.Now();
  for (const int fd : std::exchange(waiting_, {})) {
    const auto connection = connections_.find(fd);
    std::optional<Wait>& wait = connection->second.wait;
    if (!room && now < wait->until) {
      waiting_.push_back(fd);
    } else {
      const v1::RegionRequest request = std::exchange(wait, std::nullopt)->request;
      UniqueFd file;
      if (const auto reply = Answer(connection->second, request, file)) {
        Reply(connection, *reply, file);
        continue;
      }
    }
    next = std::min(next, wait->until);
  }
  return next;
}

std::optional<v1::RegionReply> RegionSocket::Release(Connection& connection,
                                                     const std::string& token) {
  const Done::Release release{connection.socket.get(), connection.client};
  const Status status = registry_.Release(connection.client, token, [done = done_, release] {
    const MutexLock lock(done->mutex);
    done->releases.push_back(release);
    eventfd_write(done->wake.get(), 1);
  });
  if (!status.ok()) return ErrorReply(status);
  connection.releasing = true;
  return std::nullopt;
}

void RegionSocket::AnswerReleases() {
  std::vector<Done::Release> releases;
  {
    const MutexLock lock(done_->mutex);
    eventfd_t count;
    eventfd_read(done_->wake.get(), &count);
    releases.swap(done_->releases);
  }
  v1::RegionReply reply;
  reply.mutable_released();
  for (const Done::Release& release : releases) {
    const auto found = connections_.find(release.fd);
    if (found == connections_.end() || found->second.client != release.client) continue;
    if (std::exchange(found->second.releasing, false)) Reply(found, reply);
  }
}

v1::RegionReply RegionSocket::Refuse(uint64_t client, const Status& status) {
  const std::string_view code = CodeName(status.code());
  logger_.Log(LogLevel::warn, "shared region refused",
              {{"client", client}, {"code", code}, {"error", status.message()}}, code);
  return ErrorReply(status);
}

v1::RegionReply RegionSocket::Create(uint64_t client, const v1::CreateRegion& request,
                                     UniqueFd& file, TimePoint& until) {
  Result<RegionRegistry::Created> created = registry_.Create(client, request.bytes(), &until);
  v1::RegionReply reply;
  if (until != TimePoint()) return reply;
  if (!created.ok()) return Refuse(client, created.status());
  logger_.Log(LogLevel::debug, "shared region created",
              {{"client", client}, {"bytes", created->bytes}});
  reply.mutable_created()->set_token(created->token);
  reply.mutable_created()->set_bytes(static_cast<uint64_t>(created->bytes));
  file = std::move(created->file);
  return reply;
}

v1::RegionReply RegionSocket::Import(uint64_t client, const v1::ImportCudaMemory& request,
                                     TimePoint& until) {
  ImportRequest lent;
  lent.device_uuid = request.device_uuid();
  lent.memory_handle = request.memory_handle();
  lent.offset = request.offset();
  lent.bytes = request.bytes();
  lent.event_handle = request.event_handle();
  const Result<std::string> token = registry_.Import(client, lent, &until);
  v1::RegionReply reply;
  if (until != TimePoint()) return reply;
  if (!token.ok()) return Refuse(client, token.status());
  logger_.Log(LogLevel::debug, "device memory lent", {{"client", client}, {"bytes", lent.bytes}});
  reply.mutable_imported()->set_token(*token);
  return reply;
}

}  // namespace attend
