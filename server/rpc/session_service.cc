// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/session_service.h"

#include <google/protobuf/arena.h>

#include <chrono>
#include <cmath>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// A shape for each of many layers is the most that a request has.
constexpr int64_t kRequestBytesMax = int64_t{64} << 10;

Result<LayerShape> ShapeOf(const v1::LayerShape& shape, int index) {
  if (shape.dtype() < v1::DTYPE_FLOAT16 || shape.dtype() > v1::DTYPE_FLOAT32) {
    return InvalidArgument("shapes[" + std::to_string(index) + "].dtype is " +
                           std::to_string(shape.dtype()) +
                           ", must be FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)");
  }
  return LayerShape{static_cast<DType>(shape.dtype()), shape.heads_kv(), shape.dim(),
                    shape.dim_v() == 0 ? shape.dim() : shape.dim_v()};
}

}  // namespace

template <class In, class Out, class Answer>
SessionServiceImpl::Reactor* SessionServiceImpl::Respond(Call& call, const Bytes& request,
                                                         Bytes& response, const Answer& answer) {
  Reactor* const reactor = call.DefaultReactor();
  Status status;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    google::protobuf::Arena arena;
    auto* const in = google::protobuf::Arena::CreateMessage<In>(&arena);
    auto* const out = google::protobuf::Arena::CreateMessage<Out>(&arena);
    const auto bytes = static_cast<int64_t>(request.Length());
    grpc::ByteBuffer message(request);
    if (bytes > kRequestBytesMax) {
      status = InvalidArgument("the message has " + std::to_string(bytes) +
                               " bytes, must have at most " + std::to_string(kRequestBytesMax));
    } else if (sessions_ == nullptr) {
      status = Unimplemented("the server has sessions off; --session-memory turns them on");
    } else if (MemoryIsShort()) {
      status = ResourceExhausted("the server's process is out of memory");
    } else if (!grpc::SerializationTraits<In>::Deserialize(&message, in).ok()) {
      status = InvalidArgument("the message cannot be parsed");
    } else {
      status = answer(TenantOf(context_, call), *in, *out);
    }
    if (status.ok()) {
      bool own = false;
      reactor->Finish(grpc::SerializationTraits<Out>::Serialize(*out, &response, &own));
      return reactor;
    }
  } catch (const std::bad_alloc&) {
    status = ResourceExhausted("the server's process is out of memory");
  }
  AddRetryPushback(context_, status.code(), call);
  reactor->Finish(ToGrpc(status));
  return reactor;
}

void SessionServiceImpl::FillInfo(const SessionInfo& info, v1::Session& response) const {
  response.set_id(info.id);
  response.set_device(context_.engine.Devices()[info.device].info.name);
  response.set_length(info.length);
  for (const int64_t length : info.layer_lengths) response.add_layer_lengths(length);
  response.set_lease_seconds_left(std::chrono::duration<double>(info.lease_left).count());
  response.set_pinned(info.pinned);
  response.set_bytes(info.bytes);
  response.set_shared_bytes(info.shared_bytes);
  response.set_ending(context_.engine.draining());
}

Status SessionServiceImpl::Fill(const Result<SessionInfo>& info, v1::Session& response) const {
  if (!info.ok()) return info.status();
  FillInfo(*info, response);
  return Status();
}

Status SessionServiceImpl::MayBegin() const {
  if (!context_.engine.draining()) return Status();
  return Unavailable("the server is draining, and its sessions end with it");
}

Status SessionServiceImpl::Create(int tenant, const v1::CreateSessionRequest& request,
                                  v1::Session& response) {
  ATTEND_RETURN_IF_ERROR(MayBegin());
  SessionSpec spec;
  spec.pinned = request.pinned();
  const double lease = request.lease_seconds();
  const double lease_max = std::chrono::duration<double>(sessions_->options().lease_max).count();
  if (!(lease >= 0 && lease <= lease_max)) {
    return InvalidArgument("lease_seconds is " + std::to_string(lease) + ", must be in [0, " +
                           std::to_string(lease_max) + "]");
  }
  spec.lease = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(lease));
  const int shapes = request.shapes_size();
  const int layers = request.layers() == 0 ? shapes : request.layers();
  if (layers < 1 || layers > sessions_->options().layers_max || (shapes != 1 && shapes != layers)) {
    return InvalidArgument("layers is " + std::to_string(request.layers()) + " with " +
                           std::to_string(shapes) + " shapes, must be in [1, " +
                           std::to_string(sessions_->options().layers_max) +
                           "] with one shape, or one for each layer");
  }
  for (int n = 0; n < layers; ++n) {
    Result<LayerShape> shape = ShapeOf(request.shapes(shapes == 1 ? 0 : n), n);
    if (!shape.ok()) return shape.status();
    spec.layers.push_back(*shape);
  }
  const std::vector<Engine::DeviceState> devices = context_.engine.Devices();
  spec.device = -1;
  for (size_t n = 0; n < devices.size() && spec.device < 0; ++n) {
    const bool takes = sessions_->memory(static_cast<int>(n)).total_bytes > 0;
    const bool named = devices[n].info.name == request.device();
    if (request.device().empty() ? takes && devices[n].healthy : named) {
      spec.device = static_cast<int>(n);
    }
  }
  if (spec.device < 0) {
    return InvalidArgument("device is \"" + request.device().substr(0, 64) +
                           "\", must be one of the server's (GetServerInfo), or empty");
  }
  return Fill(sessions_->Create(tenant, spec), response);
}

SessionServiceImpl::Reactor* SessionServiceImpl::CreateSession(Call* call, const Bytes* request,
                                                               Bytes* response) {
  return Respond<v1::CreateSessionRequest, v1::Session>(
      *call, *request, *response,
      [this](int tenant, const auto& in, auto& out) { return Create(tenant, in, out); });
}

SessionServiceImpl::Reactor* SessionServiceImpl::ForkSession(Call* call, const Bytes* request,
                                                             Bytes* response) {
  return Respond<v1::ForkSessionRequest, v1::Session>(
      *call, *request, *response, [this](int tenant, const auto& in, auto& out) {
        ATTEND_RETURN_IF_ERROR(MayBegin());
        std::optional<int64_t> length;
        if (in.has_length()) length = in.length();
        return Fill(sessions_->Fork(tenant, in.session(), length), out);
      });
}

SessionServiceImpl::Reactor* SessionServiceImpl::TruncateSession(Call* call, const Bytes* request,
                                                                 Bytes* response) {
  return Respond<v1::TruncateSessionRequest, v1::Session>(
      *call, *request, *response, [this](int tenant, const auto& in, auto& out) {
        return Fill(sessions_->Truncate(tenant, in.session(), in.length()), out);
      });
}

SessionServiceImpl::Reactor* SessionServiceImpl::FreeSession(Call* call, const Bytes* request,
                                                             Bytes* response) {
  return Respond<v1::FreeSessionRequest, v1::FreeSessionResponse>(
      *call, *request, *response,
      [this](int tenant, const auto& in, auto&) { return sessions_->Free(tenant, in.session()); });
}

SessionServiceImpl::Reactor* SessionServiceImpl::GetSession(Call* call, const Bytes* request,
                                                            Bytes* response) {
  return Respond<v1::GetSessionRequest, v1::Session>(
      *call, *request, *response, [this](int tenant, const auto& in, auto& out) {
        return Fill(sessions_->Get(tenant, in.session()), out);
      });
}

SessionServiceImpl::Reactor* SessionServiceImpl::ListSessions(Call* call, const Bytes* request,
                                                              Bytes* response) {
  return Respond<v1::ListSessionsRequest, v1::ListSessionsResponse>(
      *call, *request, *response, [this](int tenant, const auto&, auto& out) {
        for (const SessionInfo& info : sessions_->List(tenant)) FillInfo(info, *out.add_sessions());
        return Status();
      });
}

SessionServiceImpl::Reactor* SessionServiceImpl::KeepAlive(Call* call, const Bytes* request,
                                                           Bytes* response) {
  return Respond<v1::KeepAliveRequest, v1::Session>(
      *call, *request, *response, [this](int tenant, const auto& in, auto& out) {
        return Fill(sessions_->KeepAlive(tenant, in.session()), out);
      });
}

}  // namespace attend
