// SPDX-License-Identifier: Apache-2.0
//
// GRPCInferenceService on whole servers: answers and their order on streams, GPU memory lent by
// clients, and the errors that calls end with.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "inference/grpc_service.grpc.pb.h"
#include "server/engine/engine.h"
#include "tests/server/support/cuda_ipc_fixture.h"
#include "tests/server/support/infer_messages.h"

namespace attend {
namespace {

using grpc::StatusCode;
using inference::GRPCInferenceService;
using test::Sent;
using ::testing::HasSubstr;

// Converts the answer to an AttendResponse, which the tests can check.
v1::AttendResponse ToResponse(const inference::ModelInferResponse& infer) {
  v1::AttendResponse response;
  response.set_request_id(infer.id());
  for (int i = 0; i < infer.outputs_size(); ++i) {
    const auto& output = infer.outputs(i);
    v1::Tensor& tensor = output.name() == "o" ? *response.mutable_o() : *response.mutable_lse();
    tensor.set_dtype(output.datatype() == "FP16"   ? v1::DTYPE_FLOAT16
                     : output.datatype() == "BF16" ? v1::DTYPE_BFLOAT16
                                                   : v1::DTYPE_FLOAT32);
    *tensor.mutable_shape() = output.shape();
    tensor.set_byte_length(infer.raw_output_contents(i).size());
    tensor.mutable_inline_bytes();
    response.add_raw(infer.raw_output_contents(i));
  }
  return response;
}

class InferenceServiceTest : public CudaIpcTest {
 protected:
  void StartOip(const std::function<void(Config&)>& change = {}) {
    StartIpc([&](Config& config) {
      config.oip = true;
      config.oip_cuda_shared_memory = true;
      if (change) change(config);
    });
    oip_ = GRPCInferenceService::NewStub(server_->Connect());
  }
  grpc::Status Infer(const inference::ModelInferRequest& request,
                     inference::ModelInferResponse* response) {
    grpc::ClientContext context;
    return oip_->ModelInfer(&context, request, response);
  }
  grpc::Status Register(const std::string& name, const Allocation& of, int64_t device_id = 0) {
    grpc::ClientContext context;
    inference::CudaSharedMemoryRegisterRequest request;
    request.set_name(name);
    request.set_raw_handle(of.handle);
    request.set_device_id(device_id);
    request.set_byte_size(static_cast<uint64_t>(of.bytes));
    inference::CudaSharedMemoryRegisterResponse response;
    return oip_->CudaSharedMemoryRegister(&context, request, &response);
  }
  grpc::Status Unregister(const std::string& name) {
    grpc::ClientContext context;
    inference::CudaSharedMemoryUnregisterRequest request;
    request.set_name(name);
    inference::CudaSharedMemoryUnregisterResponse response;
    return oip_->CudaSharedMemoryUnregister(&context, request, &response);
  }

  std::unique_ptr<GRPCInferenceService::Stub> oip_;
};

TEST_F(InferenceServiceTest, AnswersAreRight) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  StartOip();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    test::WireProblem problem = test::RandomWireProblem(seed + i, 2e4, /*trees=*/false);
    if (!test::IsInferable(problem.request)) continue;
    inference::ModelInferResponse response;
    const grpc::Status status =
        Infer(test::ToInfer(problem.request, Sent::kRaw, random), &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.model_version(), "1");
    EXPECT_EQ(response.id(), problem.request.request_id());
    EXPECT_EQ(test::Judge(problem, ToResponse(response)), "");
  }
}

TEST_F(InferenceServiceTest, AStreamKeepsTheOrderOfItsRequests) {
  StartOip([](Config& config) {
    config.lanes = 1;
    config.max_batch_requests = 1;
  });
  std::mt19937_64 random(1);
  server_->backend().Hold();
  grpc::ClientContext context;
  const auto stream = oip_->ModelStreamInfer(&context);
  std::vector<test::WireProblem> problems;
  for (int i = 0; i < 4; ++i) problems.push_back(test::PlainWireProblem(i));
  for (int i = 0; i < 4; ++i) {
    inference::ModelInferRequest request = test::ToInfer(problems[i].request, Sent::kRaw, random);
    if (i == 2) request.set_model_name("unknown");                               // fails at once
    if (i == 3) (*request.mutable_parameters())["priority"].set_int64_param(1);  // runs first
    ASSERT_TRUE(stream->Write(request));
    if (i == 0) server_->backend().WaitForWaiting(1);
  }
  server_->WaitForQueued(2);
  server_->backend().Release();
  for (int i = 0; i < 4; ++i) {
    inference::ModelStreamInferResponse answer;
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_EQ(answer.infer_response().id(), problems[i].request.request_id());
    if (i == 2) {
      EXPECT_THAT(answer.error_message(), HasSubstr("unknown model: 'unknown'"));
      continue;
    }
    EXPECT_EQ(answer.error_message(), "");
    EXPECT_TRUE(answer.infer_response().parameters().at("triton_final_response").bool_param());
    EXPECT_EQ(test::Judge(problems[i], ToResponse(answer.infer_response())), "");
  }
  stream->WritesDone();
  inference::ModelStreamInferResponse none;
  EXPECT_FALSE(stream->Read(&none));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(InferenceServiceTest, ACancelledStreamEndsItsRequests) {
  StartOip([](Config& config) { config.lanes = 1; });
  std::mt19937_64 random(1);
  server_->backend().Hold();
  grpc::ClientContext context;
  const auto stream = oip_->ModelStreamInfer(&context);
  for (int i = 0; i < 8; ++i) {
    inference::ModelInferRequest request =
        test::ToInfer(test::PlainWireProblem(i).request, Sent::kRaw, random);
    if (i % 2 == 1) request.set_model_name("unknown");  // its answer waits for the one before
    ASSERT_TRUE(stream->Write(request));
  }
  server_->backend().WaitForWaiting(1);
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  server_->backend().Release();
  Engine& engine = server_->server().engine();
  while (engine.inflight() > 0 || engine.host_pool().used_bytes() > 0) std::this_thread::yield();
  ExpectServes();
}

TEST_F(InferenceServiceTest, ComputesInGpuMemoryOfClients) {
  StartOip();
  const Allocation in = Allocate(int64_t{1} << 20), out = Allocate(int64_t{1} << 20);
  ASSERT_TRUE(Register("in", in).ok());
  ASSERT_TRUE(Register("out", out).ok());
  EXPECT_EQ(Register("in", in).error_code(), StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Register("x", in, 1).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(imported(), 2);
  test::WireProblem problem = test::PlainWireProblem(5);
  std::mt19937_64 random(1);
  inference::ModelInferRequest request = test::ToInfer(problem.request, Sent::kRaw, random);
  request.clear_outputs();
  int64_t at = 0;
  for (int i = 0; i < 3; ++i) {
    const std::string& raw = request.raw_input_contents(i);
    std::memcpy(in.data + at, raw.data(), raw.size());
    auto& parameters = *request.mutable_inputs(i)->mutable_parameters();
    parameters["shared_memory_region"].set_string_param("in");
    parameters["shared_memory_byte_size"].set_int64_param(static_cast<int64_t>(raw.size()));
    parameters["shared_memory_offset"].set_int64_param(at);
    at += 4096;
  }
  request.clear_raw_input_contents();
  request.add_outputs()->set_name("o");
  auto* const output = request.mutable_outputs(0);
  (*output->mutable_parameters())["shared_memory_region"].set_string_param("out");
  (*output->mutable_parameters())["shared_memory_byte_size"].set_int64_param(1 << 20);
  request.add_outputs()->set_name("lse");
  inference::ModelInferResponse response;
  const grpc::Status status = Infer(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.raw_output_contents_size(), 2);
  EXPECT_EQ(response.raw_output_contents(0), "");
  EXPECT_EQ(response.outputs(0).parameters().at("shared_memory_region").string_param(), "out");
  const int64_t bytes =
      response.outputs(0).parameters().at("shared_memory_byte_size").int64_param();
  response.set_raw_output_contents(0, std::string(out.data, static_cast<size_t>(bytes)));
  EXPECT_EQ(test::Judge(problem, ToResponse(response)), "");

  (*output->mutable_parameters())["shared_memory_byte_size"].set_int64_param(bytes - 1);
  EXPECT_THAT(Infer(request, &response).error_message(), HasSubstr("should be at least"));
  EXPECT_TRUE(Unregister("").ok());
  EXPECT_EQ(imported(), 0);  // closed before the call was answered
  EXPECT_EQ(Infer(request, &response).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(InferenceServiceTest, IsDisabledByDefault) {
  Start();
  const auto oip = GRPCInferenceService::NewStub(server_->Connect());
  grpc::ClientContext context;
  inference::ServerLiveResponse response;
  EXPECT_EQ(oip->ServerLive(&context, {}, &response).error_code(), StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace attend
