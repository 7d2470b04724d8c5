// SPDX-License-Identifier: Apache-2.0

#include "server/oip/inference_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/oip/models.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/grpc_data.h"
#include "server/rpc/open_stream.h"
#include "server/rpc/service_call.h"
#include "server/rpc/stream_call.h"

namespace attend::oip {
namespace {

constexpr char kEvent[] = "inference call failed";
// Far more than any of these messages has.
constexpr int64_t kRequestBytesMax = int64_t{16} << 10;

constexpr ServiceMethod kModels{.event = kEvent, .request_bytes_max = kRequestBytesMax};
// A tenant at its limits is no reason to restart a server.
constexpr ServiceMethod kProbe{.event = kEvent,
                               .scope = Scope::kAny,
                               .charge = ServiceMethod::Charge::kBytes,
                               .request_bytes_max = kRequestBytesMax};
constexpr ServiceMethod kMemory{
    .event = kEvent, .scope = Scope::kCompute, .request_bytes_max = kRequestBytesMax};

// The model, whose version may be left open.
template <class Request>
Result<const Model*> Named(const Request& request) {
  const Model* const model = FindModel(request.name());
  const bool known = request.version().empty() || request.version() == kVersion;
  if (model != nullptr && known) return model;
  return Status(Code::kNotFound, "Request for unknown model: '" + request.name() + "'" +
                                     (known ? "" : " version '" + request.version() + "'") +
                                     " is not found");
}

// Finishes its call when it goes.
struct Finisher {
  explicit Finisher(grpc::ServerUnaryReactor& finished) : reactor(finished) {}
  ~Finisher() { reactor.Finish(grpc::Status()); }
  Finisher(const Finisher&) = delete;
  Finisher& operator=(const Finisher&) = delete;
  grpc::ServerUnaryReactor& reactor;
};

}  // namespace

InferenceServiceImpl::InferenceServiceImpl(ServiceContext& context, Options options)
    : context_(context), options_(std::move(options)), regions_(options_.regions) {}

template <class In, class Out, class Answer>
InferenceServiceImpl::Reactor* InferenceServiceImpl::Run(const ServiceMethod& method, Call* call,
                                                         const Bytes* request, Bytes* response,
                                                         const Answer& answer) {
  return ServiceCall::Run<In, Out>(context_, method, call, request, response, answer);
}

template <class In, class Out>
InferenceServiceImpl::Reactor* InferenceServiceImpl::Refuse(Call* call, const Bytes* request,
                                                            Bytes* response, const char* why) {
  return Run<In, Out>(kModels, call, request, response,
                      [why](const In&, Out&) { return Unimplemented(why); });
}

bool InferenceServiceImpl::Ready() const {
  return !context_.engine.draining() && context_.engine.healthy();
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ServerLive(Call* call, const Bytes* request,
                                                                Bytes* response) {
  return Run<inference::ServerLiveRequest, inference::ServerLiveResponse>(
      kProbe, call, request, response,
      [](const auto&, auto& out) { return out.set_live(true), Status(); });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ServerReady(Call* call, const Bytes* request,
                                                                 Bytes* response) {
  return Run<inference::ServerReadyRequest, inference::ServerReadyResponse>(
      kProbe, call, request, response,
      [this](const auto&, auto& out) { return out.set_ready(Ready()), Status(); });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ModelReady(Call* call, const Bytes* request,
                                                                Bytes* response) {
  return Run<inference::ModelReadyRequest, inference::ModelReadyResponse>(
      kProbe, call, request, response, [this](const auto& in, auto& out) {
        return out.set_ready(Named(in).ok() && Ready()), Status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ServerMetadata(Call* call,
                                                                    const Bytes* request,
                                                                    Bytes* response) {
  return Run<inference::ServerMetadataRequest, inference::ServerMetadataResponse>(
      kModels, call, request, response, [this](const auto&, auto& out) {
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
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ModelMetadata(Call* call, const Bytes* request,
                                                                   Bytes* response) {
  return Run<inference::ModelMetadataRequest, inference::ModelMetadataResponse>(
      kModels, call, request, response, [](const auto& in, auto& out) {
        const Result<const Model*> model = Named(in);
        if (model.ok()) FillMetadata(**model, out);
        return model.status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ModelConfig(Call* call, const Bytes* request,
                                                                 Bytes* response) {
  return Run<inference::ModelConfigRequest, inference::ModelConfigResponse>(
      kModels, call, request, response, [this](const auto& in, auto& out) {
        const Result<const Model*> model = Named(in);
        if (model.ok()) FillConfig(**model, options_.batch_delay_us, *out.mutable_config());
        return model.status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ModelStatistics(Call* call,
                                                                     const Bytes* request,
                                                                     Bytes* response) {
  return Run<inference::ModelStatisticsRequest, inference::ModelStatisticsResponse>(
      kModels, call, request, response, [this](const auto& in, auto& out) {
        if (in.name().empty()) {
          for (const Model& model : Models()) statistics_.Fill(model, *out.add_model_stats());
          return Status();
        }
        const Result<const Model*> model = Named(in);
        if (model.ok()) statistics_.Fill(**model, *out.add_model_stats());
        return model.status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::ModelInfer(Call* call, const Bytes* request,
                                                                Bytes* response) {
  return BeginGrpcUnary(context_, "/inference.GRPCInferenceService/ModelInfer", unary_,
                        Pass::kForward, *call, *request, *response);
}

InferenceServiceImpl::Stream* InferenceServiceImpl::ModelStreamInfer(Call* call) {
  constexpr std::string_view kMethod = "/inference.GRPCInferenceService/ModelStreamInfer";
  return OpenGrpcStream(*call, [this](StreamWire& wire) {
    return StreamCall::Open(context_, kMethod, stream_, Pass::kForward, wire);
  });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::RepositoryIndex(Call* call,
                                                                     const Bytes* request,
                                                                     Bytes* response) {
  return Run<inference::RepositoryIndexRequest, inference::RepositoryIndexResponse>(
      kModels, call, request, response, [this](const auto& in, auto& out) {
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
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::RepositoryModelLoad(Call* call,
                                                                         const Bytes* request,
                                                                         Bytes* response) {
  return Refuse<inference::RepositoryModelLoadRequest, inference::RepositoryModelLoadResponse>(
      call, request, response, "models are built in, and always loaded");
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::RepositoryModelUnload(Call* call,
                                                                           const Bytes* request,
                                                                           Bytes* response) {
  return Refuse<inference::RepositoryModelUnloadRequest, inference::RepositoryModelUnloadResponse>(
      call, request, response, "models are built in, and always loaded");
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::SystemSharedMemoryStatus(Call* call,
                                                                              const Bytes* request,
                                                                              Bytes* response) {
  return Run<inference::SystemSharedMemoryStatusRequest,
             inference::SystemSharedMemoryStatusResponse>(
      kMemory, call, request, response,
      [this](const Caller& caller, const auto& in, auto& out, auto&) {
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
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::SystemSharedMemoryRegister(
    Call* call, const Bytes* request, Bytes* response) {
  return Run<inference::SystemSharedMemoryRegisterRequest,
             inference::SystemSharedMemoryRegisterResponse>(
      kMemory, call, request, response, [this](const Caller& caller, const auto& in, auto&, auto&) {
        return regions_.RegisterFile(caller.tenant, in.name(), in.key(), in.offset(),
                                     in.byte_size());
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::SystemSharedMemoryUnregister(
    Call* call, const Bytes* request, Bytes* response) {
  return Run<inference::SystemSharedMemoryUnregisterRequest,
             inference::SystemSharedMemoryUnregisterResponse>(
      kMemory, call, request, response, [this](const Caller& caller, const auto& in, auto&, auto&) {
        regions_.Unregister(caller.tenant, RegionNames::Kind::kFile, in.name(), nullptr);
        return Status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::CudaSharedMemoryStatus(Call* call,
                                                                            const Bytes* request,
                                                                            Bytes* response) {
  return Run<inference::CudaSharedMemoryStatusRequest, inference::CudaSharedMemoryStatusResponse>(
      kMemory, call, request, response,
      [this](const Caller& caller, const auto& in, auto& out, auto&) {
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
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::CudaSharedMemoryRegister(Call* call,
                                                                              const Bytes* request,
                                                                              Bytes* response) {
  return Run<inference::CudaSharedMemoryRegisterRequest,
             inference::CudaSharedMemoryRegisterResponse>(
      kMemory, call, request, response, [this](const Caller& caller, const auto& in, auto&, auto&) {
        return regions_.RegisterGpu(caller.tenant, in.name(), in.raw_handle(), in.device_id(),
                                    in.byte_size());
      });
}

// Answered once the server has closed the memory: the client may free it then.
InferenceServiceImpl::Reactor* InferenceServiceImpl::CudaSharedMemoryUnregister(
    Call* call, const Bytes* request, Bytes* response) {
  using In = inference::CudaSharedMemoryUnregisterRequest;
  using Out = inference::CudaSharedMemoryUnregisterResponse;
  Reactor* const reactor = call->DefaultReactor();
  const ServiceCall::Ref begun =
      ServiceCall::Begin(context_, kMemory, MethodOf<In>(), *call, *request, *response, *reactor);
  if (begun == nullptr) return reactor;
  std::string name;
  const Status status = begun->Try<In, Out>([&name](const In& in, auto&) {
    name = in.name();
    return Status();
  });
  if (!status.ok()) {
    begun->End(status);
    return reactor;
  }
  const OnNoMemory wait(OnNoMemory::kWait);
  begun->Note(status);
  regions_.Unregister(begun->facts().caller.tenant, RegionNames::Kind::kGpu, name,
                      std::make_shared<Finisher>(*reactor));
  return reactor;
}

// Clients that ask for traces go on only if that is accepted. None is written.
InferenceServiceImpl::Reactor* InferenceServiceImpl::TraceSetting(Call* call, const Bytes* request,
                                                                  Bytes* response) {
  return Run<inference::TraceSettingRequest, inference::TraceSettingResponse>(
      kModels, call, request, response, [](const auto& in, auto& out) {
        auto& settings = *out.mutable_settings();
        settings["trace_level"].add_value("OFF");
        for (const auto& [name, setting] : in.settings()) {
          *settings[name].mutable_value() = setting.value();
        }
        return Status();
      });
}

InferenceServiceImpl::Reactor* InferenceServiceImpl::LogSettings(Call* call, const Bytes* request,
                                                                 Bytes* response) {
  return Run<inference::LogSettingsRequest, inference::LogSettingsResponse>(
      kModels, call, request, response, [](const auto& in, auto& out) {
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
