// SPDX-License-Identifier: Apache-2.0
//
// Requests over device memory lent by clients, through whole servers whose devices use the test's
// own memory: answers and refusals.

#include <spdlog/sinks/null_sink.h>

#include <algorithm>

#include "attend/v1/session.grpc.pb.h"
#include "server/regions/shared_memory_server.h"
#include "tests/server/support/cuda_ipc_fixture.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::RegionClient;
using test::TestServer;
using test::WireProblem;

TEST_F(CudaIpcTest, AnswersAnyRequestInPlace) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  StartIpc();
  server_->backend().MoveSpans();  // tensors not in place are computed in copies
  RegionClient client(path());
  for (int i = 0; i < std::max(20, static_cast<int>(60 * test::TestScale())); ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i);
    problem.request.set_check(false);
    const Problem& p = problem.owned.attention.problem;
    int64_t bytes = BytesO(p) + BytesLse(p) + 16 * kTensorAlignBytes;
    for (const std::string& raw : problem.request.raw()) bytes += static_cast<int64_t>(raw.size());
    const auto region = Lend(client, Allocate(bytes), kTensorAlignBytes * (i % 3));
    const int64_t behind = test::PutTensors(*region, kTensorAlignBytes * (i % 4), &problem.request);
    const bool placed = i % 3 != 0;  // otherwise O and LSE come in the answer
    if (placed) test::PlaceOutputs(*region, behind, BytesO(p), &problem.request);
    v1::AttendResponse response;
    const grpc::Status status = Attend(problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message() << Describe(problem.spec);
    EXPECT_EQ(response.transport(), "cuda-ipc");
    EXPECT_EQ(response.raw_size(), placed ? 0 : problem.request.return_lse() ? 2 : 1);
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "")
        << Describe(problem.spec);
    EXPECT_TRUE(client.Release(region->token()).has_released());
  }
  client.Close();
  WaitUntilEmpty();
  EXPECT_EQ(imported(), 0);
}

TEST_F(CudaIpcTest, TensorsOfAllKindsMixAndAreCountedByKind) {
  StartIpc([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  server_->backend().MoveSpans();
  RegionClient client(path());
  const auto lent = Lend(client, Allocate(1 << 16));
  const auto shared = client.Create(1 << 16);
  WireProblem problem = test::PlainWireProblem(1);  // q, k and v of 1 KiB, LSE of 64 bytes
  WireProblem on_device = test::PlainWireProblem(1);
  test::PutTensors(*lent, 0, &on_device.request);
  WireProblem on_host = test::PlainWireProblem(1);
  test::PutTensors(*shared, 0, &on_host.request);
  *problem.request.mutable_q() = on_device.request.q();
  *problem.request.mutable_k() = on_host.request.k();
  problem.request.mutable_raw()->DeleteSubrange(0, 2);
  test::PlaceOutputs(*lent, 8192, 1024, &problem.request);
  problem.request.clear_o_placement();  // O comes in the answer
  v1::AttendResponse response;
  const grpc::Status status = Attend(problem.request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.transport(), "cuda-ipc");
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*lent, response)), "");
  const auto bytes = [&](const char* direction, const char* transport) {
    return server_->Metric(std::string("attend_transport_bytes_total{direction=\"") + direction +
                           "\",transport=\"" + transport + "\"}");
  };
  EXPECT_EQ(bytes("in", "cuda-ipc"), 1024);
  EXPECT_EQ(bytes("in", "shm"), 1024);
  EXPECT_GT(bytes("in", "inline"), 1024);
  EXPECT_EQ(bytes("out", "cuda-ipc"), 64);
  EXPECT_EQ(bytes("out", "shm"), 0);
  EXPECT_EQ(server_->Metric("attend_cuda_ipc_regions"), 1);
  EXPECT_EQ(server_->Metric("attend_cuda_ipc_bytes"), 1 << 16);
  EXPECT_EQ(server_->Metric("attend_shared_memory_regions"), 1);
  client.Close();
  WaitUntilEmpty();
  EXPECT_EQ(server_->Metric("attend_cuda_ipc_regions"), 0);
  EXPECT_EQ(server_->Metric("attend_cuda_ipc_bytes"), 0);
}

// However busy that device is.
TEST_F(CudaIpcTest, TheDeviceThatHasTheTensorsComputes) {
  StartIpc({}, 2);
  RegionClient client(path());
  for (const int device : {1, 0, 1, 1}) {
    const auto region = Lend(client, Allocate(1 << 16, device));
    const WireProblem problem = Shared(*region, 3);
    v1::AttendResponse response;
    const grpc::Status status = Attend(problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.device(), device == 0 ? "cpu" : "cpu1");
  }
  EXPECT_EQ(server_->backend(0).submitted_items(), 1);
  EXPECT_EQ(server_->backend(1).submitted_items(), 3);
}

TEST_F(CudaIpcTest, TensorsOnTwoDevicesAreRefused) {
  StartIpc({}, 2);
  RegionClient client(path());
  const auto first = Lend(client, Allocate(1 << 16, 0));
  const auto second = Lend(client, Allocate(1 << 16, 1));
  WireProblem problem = Shared(*first, 4);
  problem.request.mutable_k()->mutable_shared_memory()->set_region(second->token());
  ExpectRefused(problem.request, StatusCode::INVALID_ARGUMENT,
                "k is in memory of cpu1, other tensors are in that of cpu");
  problem = Shared(*first, 4);
  problem.request.mutable_o_placement()->mutable_shared_memory()->set_region(second->token());
  ExpectRefused(problem.request, StatusCode::INVALID_ARGUMENT, "o_placement is in memory of");
}

TEST_F(CudaIpcTest, TensorsOnAnotherDeviceThanTheSessionAreRefused) {
  StartIpc([](Config& config) { config.session_memory_bytes = int64_t{32} << 20; }, 2);
  v1::CreateSessionRequest create;
  v1::LayerShape* const shape = create.add_shapes();
  shape->set_dtype(v1::DTYPE_FLOAT32);
  shape->set_heads_kv(2);
  shape->set_dim(16);
  create.set_device("cpu");
  v1::Session session;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::SessionService::NewStub(server_->Connect())
                  ->CreateSession(&context, create, &session)
                  .ok());
  RegionClient client(path());
  for (const int device : {1, 0}) {
    const auto lent = Lend(client, Allocate(1 << 16, device));
    WireProblem problem = test::PlainWireProblem(1);
    WireProblem on_device = test::PlainWireProblem(1);
    test::PutTensors(*lent, 0, &on_device.request);
    *problem.request.mutable_q() = on_device.request.q();
    problem.request.mutable_raw()->DeleteSubrange(0, 1);
    problem.request.add_sessions()->set_session(session.id());
    if (device == 1) {
      ExpectRefused(problem.request, StatusCode::INVALID_ARGUMENT,
                    "sessions are on another device than the request's tensors");
      continue;
    }
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(problem.request, &response).ok());
    EXPECT_EQ(test::Judge(problem, response), "");
  }
}

TEST_F(CudaIpcTest, TensorsOnALostDeviceAreUnavailable) {
  StartIpc({}, 2);
  RegionClient client(path());
  const auto region = Lend(client, Allocate(1 << 16, 1));
  const WireProblem problem = Shared(*region, 5);
  server_->backend(1).LoseDevice();
  v1::AttendResponse response;
  EXPECT_EQ(Attend(problem.request, &response).error_code(), StatusCode::UNAVAILABLE);
  ExpectRefused(problem.request, StatusCode::UNAVAILABLE,
                "device cpu1, where the tensors are, is lost");
  ExpectServes();
}

TEST_F(CudaIpcTest, ImportsThatDoNotFitAreRefused) {
  StartIpc();
  RegionClient client(path());
  const Allocation memory = Allocate(1 << 16);
  const auto refuse = [&](const v1::ImportCudaMemory& lent, Code code, const std::string& part) {
    const v1::RegionReply reply = client.Import(lent);
    ASSERT_TRUE(reply.has_error());
    EXPECT_EQ(reply.error().code(), static_cast<int>(code)) << reply.error().message();
    EXPECT_NE(reply.error().message().find(part), std::string::npos) << reply.error().message();
    EXPECT_EQ(imported(), 0);
    EXPECT_EQ(stats().lent_regions, 0);
  };
  v1::ImportCudaMemory lent = ImportOf(memory, 0, 65536);
  lent.set_device_uuid("short");
  refuse(lent, Code::kInvalidArgument, "device_uuid has 5 bytes, must have 16");
  lent.set_device_uuid(std::string(16, '\xab'));
  refuse(lent, Code::kNotFound,
         "GPU-abababab-abab-abab-abab-abababababab, this server computes on cpu");
  lent = ImportOf(memory, 0, 65536);
  lent.set_memory_handle("unknown");
  refuse(lent, Code::kInvalidArgument, "the memory handle is unknown");
  lent = ImportOf(memory, 0, 65536);
  lent.set_event_handle("unknown");
  refuse(lent, Code::kInvalidArgument, "the event handle is unknown");
  refuse(ImportOf(memory, 0, 0), Code::kInvalidArgument, "bytes is 0");
  refuse(ImportOf(memory, 16, 256), Code::kInvalidArgument,
         "offset is 16, must be a multiple of 256");
  refuse(ImportOf(memory, 0, 65537), Code::kInvalidArgument,
         "must end within the allocation's 65536");
  refuse(ImportOf(memory, 256, 65536), Code::kInvalidArgument, "offset is 256 and bytes is 65536");
  refuse(ImportOf(memory, 65536, 1), Code::kInvalidArgument, "offset is 65536");
  refuse(ImportOf(memory, UINT64_MAX - 255, 512), Code::kInvalidArgument,
         "must end within the allocation's 65536");
  refuse(ImportOf(memory, 256, UINT64_MAX), Code::kInvalidArgument,
         "must end within the allocation's 65536");
  server_->backend().RefuseImports(Status(Code::kAlreadyExists, "mapped before"));
  refuse(ImportOf(memory, 0, 65536), Code::kAlreadyExists, "mapped before");
  server_->backend().RefuseImports(Status());
  EXPECT_EQ(stats().refused, 12);
  Lend(client, memory, 65536 - 256);
  EXPECT_EQ(imported(), 1);
}

TEST_F(CudaIpcTest, BadPlacesAreRefused) {
  StartIpc();
  RegionClient client(path());
  const Allocation memory = Allocate(65536);
  const auto region = Lend(client, memory);
  const auto again = Lend(client, memory, 256);  // the same memory, 256 bytes later
  const WireProblem good = Shared(*region, 6);
  const auto with = [&](const std::function<void(v1::AttendRequest&)>& change) {
    v1::AttendRequest request = good.request;
    change(request);
    return request;
  };
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  for (const auto& [offset, part] :
       {std::pair<uint64_t, const char*>{100, "must be a multiple of 256"},
        {65536, "with 1024 bytes it must end within the region's 65536"},
        {65536 - 768, "k.shared_memory.offset is 64768"},
        {UINT64_MAX - 255, "is 18446744073709551360"}}) {
    ExpectRefused(with([offset = offset](v1::AttendRequest& request) {
                    request.mutable_k()->mutable_shared_memory()->set_offset(offset);
                  }),
                  invalid, part);
  }
  ExpectRefused(with([&](v1::AttendRequest& request) {
                  v1::SharedMemory* o = request.mutable_o_placement()->mutable_shared_memory();
                  o->set_region(again->token());
                  o->set_offset(0);
                }),
                invalid, "must not overlap q's [0, 1024)");
  ExpectRefused(with([](v1::AttendRequest& request) { request.set_check(true); }),
                StatusCode::UNIMPLEMENTED, "check is set, and tensors are in memory of cpu");
  ExpectRefused(with([](v1::AttendRequest& request) {
                  request.mutable_v()->mutable_shared_memory()->set_region(std::string(16, 'x'));
                }),
                StatusCode::NOT_FOUND, "v.shared_memory.region names no region");
  ASSERT_TRUE(client.Release(again->token()).has_released());
  ExpectRefused(with([&](v1::AttendRequest& request) {
                  request.mutable_q()->mutable_shared_memory()->set_region(again->token());
                }),
                StatusCode::NOT_FOUND, "q.shared_memory.region names no region");
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(good.request, &response).ok());
  EXPECT_EQ(test::Judge(const_cast<WireProblem&>(good), test::WithBytes(*region, response)), "");
}

TEST_F(CudaIpcTest, ImportsBelongToTheirClientAndAreBounded) {
  StartIpc([](Config& config) { config.shared_memory_client_regions = 3; });
  RegionClient client(path()), thief(path());
  const Allocation memory = Allocate(65536);
  const auto region = Lend(client, memory);
  client.Create(4096);
  Lend(client, memory);
  const v1::RegionReply full = client.Import(ImportOf(memory, 0, 65536));
  EXPECT_EQ(full.error().code(), static_cast<int>(Code::kResourceExhausted));
  EXPECT_NE(full.error().message().find("may have at most 3"), std::string::npos);
  EXPECT_EQ(thief.Release(region->token()).error().code(), static_cast<int>(Code::kNotFound));
  Lend(thief, memory);
  EXPECT_EQ(imported(), 3);
  EXPECT_TRUE(client.Release(region->token()).has_released());
  Lend(client, memory);
}

TEST_F(CudaIpcTest, TheServersOwnChecksSkipLentTensors) {
  StartIpc([](Config& config) {
    config.reference_check = "all";
    config.check_sample = 1;
  });
  RegionClient client(path());
  const auto region = Lend(client, Allocate(65536));
  WireProblem problem = Shared(*region, 7);
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(problem.request, &response).ok());
  EXPECT_FALSE(response.has_check());
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
  const WireProblem plain = test::PlainWireProblem(8);
  ASSERT_TRUE(Attend(plain.request, &response).ok());
  EXPECT_TRUE(response.has_check());
}

TEST_F(CudaIpcTest, TheServersInfoHasItsLimits) {
  StartIpc();
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_TRUE(info.shared_memory().cuda_ipc());
  EXPECT_EQ(info.transports(3), "cuda-ipc");
  EXPECT_EQ(info.devices(0).uuid(), TestServer::DeviceUuid(0));
}

TEST_F(CudaIpcTest, DisabledItIsUnimplementedAndNamesTheSetting) {
  Start();
  RegionClient client(path());
  v1::ImportCudaMemory lent;
  lent.set_bytes(1);
  const v1::RegionReply reply = client.Import(lent);
  EXPECT_EQ(reply.error().code(), static_cast<int>(Code::kUnimplemented));
  EXPECT_NE(reply.error().message().find("--cuda-ipc"), std::string::npos);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_FALSE(info.shared_memory().cuda_ipc());
  EXPECT_EQ(info.transports_size(), 3);
  client.Create(4096);
}

TEST_F(CudaIpcTest, WithoutAGpuTheServerDoesNotStart) {
  Config config;
  config.listen = {"127.0.0.1:0"};
  config.metrics_listen = "off";
  config.shared_memory = config.cuda_ipc = true;
  std::string pattern = std::filesystem::temp_directory_path() / "attend-ipc-XXXXXX";
  folder_ = mkdtemp(pattern.data());
  config.shared_memory_socket = folder_ / "shm.sock";
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<test::FakeBackend>());
  const auto server = Server::Start(
      config, std::move(backends),
      std::make_shared<Logger>(Logger::Options(), std::make_shared<spdlog::sinks::null_sink_mt>()));
  ASSERT_FALSE(server.ok());
  EXPECT_EQ(server.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(server.status().message().find("cuda-ipc"), std::string::npos);
}

}  // namespace
}  // namespace attend
