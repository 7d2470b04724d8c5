// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/session_service.h"

#include <chrono>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "kernels/util/counted.h"
#include "server/wire/session_uses.h"

namespace attend {
namespace {

constexpr char kEvent[] = "session call failed";
constexpr ServiceMethod kWithinLimits{.event = kEvent, .scope = Scope::kSessions};
constexpr ServiceMethod kAtLimits{
    .event = kEvent, .scope = Scope::kSessions, .charge = ServiceMethod::Charge::kBytes};

Result<LayerShape> ShapeOf(const v1::LayerShape& shape, int index) {
  if (!IsDType(shape.dtype())) {
    return InvalidArgument("shapes[" + std::to_string(index) + "].dtype is " +
                           std::to_string(shape.dtype()) +
                           ", must be FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)");
  }
  return LayerShape{static_cast<DType>(shape.dtype()), shape.heads_kv(), shape.dim(),
                    shape.dim_v() == 0 ? shape.dim() : shape.dim_v()};
}

}  // namespace

Result<int64_t> PageSize(int64_t asked) {
  constexpr int64_t kMost = 256;
  if (asked >= 0 && asked <= kMost) return asked == 0 ? kMost : asked;
  return InvalidArgument("page_size is " + std::to_string(asked) + ", must be in [1, " +
                         std::to_string(kMost) + "], or 0 for the maximum");
}

void FillSession(const Engine& engine, const SessionInfo& info, v1::Session& response) {
  response.set_id(info.id);
  response.set_device(engine.backends()[info.device]->info().name);
  response.set_length(info.length);
  for (const int64_t length : info.layer_lengths) response.add_layer_lengths(length);
  response.set_lease_seconds_left(std::chrono::duration<double>(info.lease_left).count());
  response.set_pinned(info.pinned);
  response.set_bytes(info.bytes);
  response.set_shared_bytes(info.shared_bytes);
  response.set_ending(engine.draining());
  response.set_lost(info.lost);
}

template <class In, class Out, class Answer>
void SessionServiceImpl::Add(CallTable& table, const ServiceMethod& method, const Answer& answer) {
  AddSmall<In, Out>(
      table, method,
      [answer](const Caller& caller, const In& in, Out& out, Refusal& refusal) {
        return answer(caller.tenant, in, out, refusal);
      },
      [this](const WireCall&) { return sessions_ == nullptr ? SessionsAreOff() : Status(); });
}

Status SessionServiceImpl::Fill(const Result<SessionInfo>& info, v1::Session& response) const {
  if (!info.ok()) return info.status();
  FillSession(context_.engine, *info, response);
  return Status();
}

Status SessionServiceImpl::MayBegin() const {
  if (!context_.engine.draining()) return Status();
  return SessionsAreEnding();
}

Status SessionServiceImpl::Create(int tenant, const v1::CreateSessionRequest& request,
                                  v1::Session& response) {
  ATTEND_RETURN_IF_ERROR(MayBegin());
  SessionSpec spec;
  spec.pinned = request.pinned();
  // The table's bounds, checked here too: not every number is a Duration.
  const double lease = request.lease_seconds();
  const std::chrono::duration<double> lease_max = sessions_->options().lease_max;
  if (!(lease >= 0 && lease <= lease_max.count())) {
    return InvalidArgument("lease_seconds is " + NumberText(lease) + ", must be in [0, " +
                           std::to_string(std::llround(lease_max.count())) + "]");
  }
  spec.lease = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(lease));
  const int shapes = request.shapes_size();
  const int64_t layers = request.layers() == 0 ? shapes : request.layers();
  if (shapes != 1 && shapes != layers) {
    return InvalidArgument("shapes has " + std::to_string(shapes) + " entries, must have 1 or " +
                           std::to_string(layers) + ", one for each layer");
  }
  ATTEND_RETURN_IF_ERROR(sessions_->CheckLayers(layers));
  for (int n = 0; n < layers; ++n) {
    Result<LayerShape> shape = ShapeOf(request.shapes(shapes == 1 ? 0 : n), n);
    if (!shape.ok()) return shape.status();
    spec.layers.push_back(*shape);
  }
  const std::vector<Engine::DeviceState> devices = context_.engine.Devices();
  spec.device = -1;
  std::vector<bool> healthy, healthy_gpus;
  for (const Engine::DeviceState& device : devices) {
    if (device.info.name == request.device()) spec.device = static_cast<int>(healthy.size());
    healthy.push_back(device.healthy);
    healthy_gpus.push_back(device.healthy && device.info.kind == DeviceKind::kCuda);
  }
  if (request.device().empty()) {
    spec.device = sessions_->ChooseDevice(healthy_gpus);
    if (spec.device < 0) spec.device = sessions_->ChooseDevice(healthy);
  }
  if (spec.device < 0 && request.device().empty()) {
    return Unavailable("no device with memory for sessions is healthy");
  }
  if (spec.device < 0) {
    return InvalidArgument("device is \"" + request.device().substr(0, 64) +
                           "\", must be one of the server's (GetServerInfo), or empty");
  }
  return Fill(sessions_->Create(tenant, spec), response);
}

Status SessionServiceImpl::Fork(int tenant, const v1::ForkSessionRequest& request,
                                v1::Session& response, Refusal& refusal) {
  ATTEND_RETURN_IF_ERROR(MayBegin());
  std::optional<int64_t> length;
  if (request.has_length()) length = request.length();
  return Fill(sessions_->Fork(tenant, request.session(), length, &refusal), response);
}

Status SessionServiceImpl::List(int tenant, const v1::ListSessionsRequest& request,
                                v1::ListSessionsResponse& response) const {
  const Result<int64_t> count = PageSize(request.page_size());
  if (!count.ok()) return count.status();
  const SessionTable::Listed list = sessions_->List(tenant, request.after(), *count);
  for (const SessionInfo& info : list.sessions) {
    FillSession(context_.engine, info, *response.add_sessions());
  }
  response.set_more(list.more);
  return Status();
}

void SessionServiceImpl::AddTo(CallTable& table) {
  Add<v1::CreateSessionRequest, v1::Session>(
      table, kWithinLimits,
      [this](int tenant, const auto& in, auto& out, auto&) { return Create(tenant, in, out); });
  Add<v1::ForkSessionRequest, v1::Session>(
      table, kWithinLimits, [this](int tenant, const auto& in, auto& out, auto& refusal) {
        return Fork(tenant, in, out, refusal);
      });
  Add<v1::TruncateSessionRequest, v1::Session>(
      table, kWithinLimits, [this](int tenant, const auto& in, auto& out, auto& refusal) {
        return Fill(sessions_->Truncate(tenant, in.session(), in.length(), &refusal), out);
      });
  Add<v1::KeepDraftRequest, v1::Session>(
      table, kWithinLimits, [this](int tenant, const auto& in, auto& out, auto& refusal) {
        const std::span<const int64_t> kept(in.kept().data(), static_cast<size_t>(in.kept_size()));
        return Fill(sessions_->KeepDraft(tenant, in.session(), in.length(), kept, &refusal), out);
      });
  Add<v1::FreeSessionRequest, v1::FreeSessionResponse>(
      table, kAtLimits, [this](int tenant, const auto& in, auto&, auto&) {
        return sessions_->Free(tenant, in.session());
      });
  Add<v1::GetSessionRequest, v1::Session>(table, kWithinLimits,
                                          [this](int tenant, const auto& in, auto& out, auto&) {
                                            return Fill(sessions_->Get(tenant, in.session()), out);
                                          });
  Add<v1::ListSessionsRequest, v1::ListSessionsResponse>(
      table, kWithinLimits,
      [this](int tenant, const auto& in, auto& out, auto&) { return List(tenant, in, out); });
  Add<v1::KeepAliveRequest, v1::Session>(
      table, kAtLimits, [this](int tenant, const auto& in, auto& out, auto&) {
        return Fill(sessions_->KeepAlive(tenant, in.session()), out);
      });
}

}  // namespace attend
