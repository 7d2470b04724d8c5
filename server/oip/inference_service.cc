// SPDX-License-Identifier: Apache-2.0

#include "server/oip/inference_service.h"

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inference/grpc_service.pb.h"
#include "server/memory/memory_reserve.h"
#include "server/oip/models.h"
#include "server/rpc/service_call.h"
#include "server/rpc/stream_call.h"
#include "server/rpc/unary_call.h"

namespace attend::oip {
namespace {

constexpr char kEvent[] = "inference call failed";
// Far above the size of any of these messages.
constexpr int64_t kRequestBytesMax = int64_t{16} << 10;

constexpr ServiceMethod kModels{.event = kEvent, .request_bytes_max = kRequestBytesMax};
// Charged, but never refused: a tenant at its limits is no reason to restart the server.
constexpr ServiceMethod kProbe{.event = kEvent,
                               .scope = Scope::kAny,
                               .charge = ServiceMethod::Charge::kBytes,
                               .request_bytes_max = kRequestBytesMax};
constexpr ServiceMethod kMemory{
    .event = kEvent, .scope = Scope::kCompute, .request_bytes_max = kRequestBytesMax};

// The model with this name and version; an empty version matches.
template <class Request>
Result<const Model*> Named(const Request& request) {
  const Model* const model = FindModel(request.name());
  const bool known = request.version().empty() || request.version() == kVersion;
  if (model != nullptr && known) return model;
  return Status(Code::kNotFound, "Request for unknown model: '" + request.name() + "'" +
                                     (known ? "" : " version '" + request.version() + "'") +
                                     " is not found");
}

}  // namespace

InferenceServiceImpl::InferenceServiceImpl(ServiceContext& context, Options options)
    : context_(context), options_(std::move(options)), regions_(options_.regions) {}

bool InferenceServiceImpl::Ready() const {
  return !context_.engine.draining() && context_.engine.healthy();
}

void InferenceServiceImpl::AddTo(CallTable& table) {
  UnaryCall::Add(table, "/inference.GRPCInferenceService/ModelInfer", unary_, Pass::kForward);
  StreamCall::Add(table, "/inference.GRPCInferenceService/ModelStreamInfer", stream_,
                  Pass::kForward);
  AddProbes(table);
  AddModels(table);
  AddRepository(table);
  AddFiles(table);
  AddGpuMemory(table);
  AddSettings(table);
}

void InferenceServiceImpl::AddProbes(CallTable& table) {
  AddSmall<inference::ServerLiveRequest, inference::ServerLiveResponse>(
      table, kProbe, [](const auto&, auto& out) { return out.set_live(true), Status(); });
  AddSmall<inference::ServerReadyRequest, inference::ServerReadyResponse>(
      table, kProbe, [this](const auto&, auto& out) { return out.set_ready(Ready()), Status(); });
  AddSmall<inference::ModelReadyRequest, inference::ModelReadyResponse>(
      table, kProbe, [this](const auto& in, auto& out) {
        return out.set_ready(Named(in).ok() && Ready()), Status();
      });
}

void InferenceServiceImpl::AddModels(CallTable& table) {
  AddSmall<inference::ServerMetadataRequest, inference::ServerMetadataResponse>(
      table, kModels, [this](const auto&, auto& out) {
        out.set_name("attend");
        out.set_version(options_.version);
        for (const char* const each : {"model_configuration", "model_repository", "parameters",
                                       "schedule_policy", "statistics"}) {
          out.add_extensions(each);
        }
        if (regions_.files()) out.add_extensions("system_shared_memory");
        if (regions_.gpus()) out.add_extensions("cuda_shared_memory");
        return Status();
      });
  AddSmall<inference::ModelMetadataRequest, inference::ModelMetadataResponse>(
      table, kModels, [](const auto& in, auto& out) {
        const Result<const Model*> model = Named(in);
        if (model.ok()) FillMetadata(**model, out);
        return model.status();
      });
  AddSmall<inference::ModelConfigRequest, inference::ModelConfigResponse>(
      table, kModels, [this](const auto& in, auto& out) {
        const Result<const Model*> model = Named(in);
        if (model.ok()) FillConfig(**model, options_.batch_delay_us, *out.mutable_config());
        return model.status();
      });
  AddSmall<inference::ModelStatisticsRequest, inference::ModelStatisticsResponse>(
      table, kModels, [this](const auto& in, auto& out) {
        if (in.name().empty()) {
          for (const Model& model : Models()) statistics_.Fill(model, *out.add_model_stats());
          return Status();
        }
        const Result<const Model*> model = Named(in);
        if (model.ok()) statistics_.Fill(**model, *out.add_model_stats());
        return model.status();
      });
}

void InferenceServiceImpl::AddRepository(CallTable& table) {
  AddSmall<inference::RepositoryIndexRequest, inference::RepositoryIndexResponse>(
      table, kModels, [this](const auto& in, auto& out) {
        if (!in.repository_name().empty()) {
          return Unimplemented("repository_name is '" + in.repository_name() +
                               "', must be empty: models are built in");
        }
        const bool ready = Ready();
        if (in.ready() && !ready) return Status();
        for (const Model& model : Models()) {
          auto* const index = out.add_models();
          index->set_name(model.name);
          index->set_version(kVersion);
          index->set_state(ready ? "READY" : "UNAVAILABLE");
        }
        return Status();
      });
  const auto refuse = [](const auto&, auto&) {
    return Unimplemented("models are built in, and always loaded");
  };
  AddSmall<inference::RepositoryModelLoadRequest, inference::RepositoryModelLoadResponse>(
      table, kModels, refuse);
  AddSmall<inference::RepositoryModelUnloadRequest, inference::RepositoryModelUnloadResponse>(
      table, kModels, refuse);
}

void InferenceServiceImpl::AddFiles(CallTable& table) {
  AddSmall<inference::SystemSharedMemoryStatusRequest, inference::SystemSharedMemoryStatusResponse>(
      table, kMemory, [this](const Caller& caller, const auto& in, auto& out, auto&) {
        const auto listed = regions_.List(caller.tenant, RegionNames::Kind::kFile, in.name());
        if (!listed.ok()) return listed.status();
        for (const NamedRegionRef& region : *listed) {
          auto& status = (*out.mutable_regions())[region->name];
          status.set_name(region->name);
          status.set_key(region->file->key());
          status.set_offset(static_cast<uint64_t>(region->offset));
          status.set_byte_size(static_cast<uint64_t>(region->bytes));
        }
        return Status();
      });
  AddSmall<inference::SystemSharedMemoryRegisterRequest,
           inference::SystemSharedMemoryRegisterResponse>(
      table, kMemory, [this](const Caller& caller, const auto& in, auto&, auto&) {
        return regions_.RegisterFile(caller.tenant, in.name(), in.key(), in.offset(),
                                     in.byte_size());
      });
  AddSmall<inference::SystemSharedMemoryUnregisterRequest,
           inference::SystemSharedMemoryUnregisterResponse>(
      table, kMemory, [this](const Caller& caller, const auto& in, auto&, auto&) {
        regions_.Unregister(caller.tenant, RegionNames::Kind::kFile, in.name(), nullptr);
        return Status();
      });
}

void InferenceServiceImpl::AddGpuMemory(CallTable& table) {
  AddSmall<inference::CudaSharedMemoryStatusRequest, inference::CudaSharedMemoryStatusResponse>(
      table, kMemory, [this](const Caller& caller, const auto& in, auto& out, auto&) {
        const auto listed = regions_.List(caller.tenant, RegionNames::Kind::kGpu, in.name());
        if (!listed.ok()) return listed.status();
        for (const NamedRegionRef& region : *listed) {
          auto& status = (*out.mutable_regions())[region->name];
          status.set_name(region->name);
          status.set_device_id(static_cast<uint64_t>(region->device_id));
          status.set_byte_size(static_cast<uint64_t>(region->bytes));
        }
        return Status();
      });
  AddSmall<inference::CudaSharedMemoryRegisterRequest, inference::CudaSharedMemoryRegisterResponse>(
      table, kMemory, [this](const Caller& caller, const auto& in, auto&, auto&) {
        return regions_.RegisterGpu(caller.tenant, in.name(), in.raw_handle(), in.device_id(),
                                    in.byte_size());
      });
  // Ends once the server has closed the memory, so that the client may free it then.
  AddSmall<inference::CudaSharedMemoryUnregisterRequest,
           inference::CudaSharedMemoryUnregisterResponse>(
      table, kMemory, [this](ServiceCall& call, const auto& in, auto&) {
        regions_.Unregister(call.caller().tenant, RegionNames::Kind::kGpu, in.name(),
                            call.EndLater());
        return Status();
      });
}

void InferenceServiceImpl::AddSettings(CallTable& table) {
  // Clients that set trace settings expect them to be accepted; no trace is written.
  AddSmall<inference::TraceSettingRequest, inference::TraceSettingResponse>(
      table, kModels, [](const auto& in, auto& out) {
        auto& settings = *out.mutable_settings();
        settings["trace_level"].add_value("OFF");
        for (const auto& [name, setting] : in.settings()) {
          *settings[name].mutable_value() = setting.value();
        }
        return Status();
      });
  AddSmall<inference::LogSettingsRequest, inference::LogSettingsResponse>(
      table, kModels, [](const auto& in, auto& out) {
        for (const auto& [name, setting] : in.settings()) {
          auto& echo = (*out.mutable_settings())[name];
          if (setting.has_bool_param()) echo.set_bool_param(setting.bool_param());
          if (setting.has_uint32_param()) echo.set_uint32_param(setting.uint32_param());
          if (setting.has_string_param()) echo.set_string_param(setting.string_param());
        }
        return Status();
      });
}

}  // namespace attend::oip
