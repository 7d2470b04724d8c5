// SPDX-License-Identifier: Apache-2.0
//
// inference.GRPCInferenceService: the Open Inference Protocol with Triton's extensions, over the
// same engine as attend.v1. Calls for attention go the way of Attend and AttendStream; the others
// are answered on the thread that brought them, but for those that may wait for a device.

#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>

#include "inference/grpc_service.grpc.pb.h"
#include "server/oip/infer_format.h"
#include "server/oip/model_statistics.h"
#include "server/oip/region_names.h"
#include "server/rpc/call_context.h"

namespace attend {
struct ServiceMethod;
}

namespace attend::oip {

using Rpcs = inference::GRPCInferenceService;
using RawHealth = Rpcs::WithRawCallbackMethod_ServerLive<
    Rpcs::WithRawCallbackMethod_ServerReady<Rpcs::WithRawCallbackMethod_ModelReady<Rpcs::Service>>>;
using RawModels = Rpcs::WithRawCallbackMethod_ServerMetadata<
    Rpcs::WithRawCallbackMethod_ModelMetadata<Rpcs::WithRawCallbackMethod_ModelConfig<
        Rpcs::WithRawCallbackMethod_ModelStatistics<RawHealth>>>>;
using RawInfer =
    Rpcs::WithRawCallbackMethod_ModelInfer<Rpcs::WithRawCallbackMethod_ModelStreamInfer<RawModels>>;
using RawRepository =
    Rpcs::WithRawCallbackMethod_RepositoryIndex<Rpcs::WithRawCallbackMethod_RepositoryModelLoad<
        Rpcs::WithRawCallbackMethod_RepositoryModelUnload<RawInfer>>>;
using RawSystemMemory = Rpcs::WithRawCallbackMethod_SystemSharedMemoryStatus<
    Rpcs::WithRawCallbackMethod_SystemSharedMemoryRegister<
        Rpcs::WithRawCallbackMethod_SystemSharedMemoryUnregister<RawRepository>>>;
using RawCudaMemory = Rpcs::WithRawCallbackMethod_CudaSharedMemoryStatus<
    Rpcs::WithRawCallbackMethod_CudaSharedMemoryRegister<
        Rpcs::WithRawCallbackMethod_CudaSharedMemoryUnregister<RawSystemMemory>>>;
using RawRpcs = Rpcs::WithRawCallbackMethod_TraceSetting<
    Rpcs::WithRawCallbackMethod_LogSettings<RawCudaMemory>>;

class InferenceServiceImpl final : public RawRpcs {
 public:
  struct Options {
    std::string version;         // the server's
    int64_t batch_delay_us = 0;  // that batches wait for more requests
    RegionNames::Options regions;
  };
  // `context` must outlive the service, and the service every call.
  InferenceServiceImpl(ServiceContext& context, Options options);

  using Reactor = grpc::ServerUnaryReactor;
  using Call = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  Reactor* ServerLive(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ServerReady(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ModelReady(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ServerMetadata(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ModelMetadata(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ModelConfig(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ModelStatistics(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ModelInfer(Call* call, const Bytes* request, Bytes* response) override;
  Stream* ModelStreamInfer(Call* call) override;
  Reactor* RepositoryIndex(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* RepositoryModelLoad(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* RepositoryModelUnload(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* SystemSharedMemoryStatus(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* SystemSharedMemoryRegister(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* SystemSharedMemoryUnregister(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* CudaSharedMemoryStatus(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* CudaSharedMemoryRegister(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* CudaSharedMemoryUnregister(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* TraceSetting(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* LogSettings(Call* call, const Bytes* request, Bytes* response) override;

 private:
  // `answer` as ServiceCall::Run has it.
  template <class In, class Out, class Answer>
  Reactor* Run(const ServiceMethod& method, Call* call, const Bytes* request, Bytes* response,
               const Answer& answer);
  template <class In, class Out>
  Reactor* Refuse(Call* call, const Bytes* request, Bytes* response, const char* why);
  bool Ready() const;

  ServiceContext& context_;
  const Options options_;
  RegionNames regions_;
  oip::ModelStatistics statistics_;
  const InferFormat unary_{InferFormat::Call::kUnary, regions_, statistics_};
  const InferFormat stream_{InferFormat::Call::kStream, regions_, statistics_};
};

}  // namespace attend::oip
