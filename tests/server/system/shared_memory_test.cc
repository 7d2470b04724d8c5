// SPDX-License-Identifier: Apache-2.0
//
// Requests over shared memory, through whole servers: answers and refusals.

#include <algorithm>
#include <array>
#include <cstring>

#include "server/regions/shared_memory_server.h"
#include "tests/server/support/shared_memory_fixture.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::MappedRegion;
using test::RegionClient;
using test::TestServer;
using test::WireProblem;

TEST_F(SharedMemoryTest, AnswersAnyRequestExactly) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Start();
  RegionClient client(path());
  for (int i = 0; i < std::max(20, static_cast<int>(100 * test::TestScale())); ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i);
    problem.request.set_check(i % 4 == 0);
    const Problem& p = problem.owned.attention.problem;
    int64_t bytes = BytesO(p) + BytesLse(p) + 16 * kTensorAlignBytes;
    for (const std::string& raw : problem.request.raw()) bytes += static_cast<int64_t>(raw.size());
    const auto region = client.Create(bytes);
    const int64_t behind = test::PutTensors(*region, kTensorAlignBytes * (i % 7), &problem.request);
    const bool placed = i % 3 != 0;  // otherwise O and LSE come in the answer
    if (placed) test::PlaceOutputs(*region, behind, BytesO(p), &problem.request);
    v1::AttendResponse response;
    const grpc::Status status = Attend(problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message() << Describe(problem.spec);
    EXPECT_EQ(response.transport(), "shm");
    EXPECT_EQ(response.o().has_shared_memory(), placed);
    EXPECT_EQ(response.raw_size(), placed ? 0 : problem.request.return_lse() ? 2 : 1);
    EXPECT_TRUE(!response.has_check() || response.check().ok()) << response.check().detail();
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "")
        << Describe(problem.spec);
    EXPECT_TRUE(client.Release(region->token()).has_released());
  }
  client.Close();
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, InlineAndSharedTensorsMix) {
  Start([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  RegionClient client(path());
  const auto region = client.Create(1 << 20);
  for (int shared = 0; shared < 8; ++shared) {  // which of q, k and v are
    SCOPED_TRACE(shared);
    WireProblem problem = test::PlainWireProblem(static_cast<uint64_t>(shared) + 1);
    const v1::AttendRequest whole = problem.request;
    test::PutTensors(*region, 0, &problem.request);
    const std::array<v1::Tensor*, 3> tensors = {
        problem.request.mutable_q(), problem.request.mutable_k(), problem.request.mutable_v()};
    for (int i = 0; i < 3; ++i) {
      if ((shared >> i) & 1) continue;
      tensors[static_cast<size_t>(i)]->mutable_inline_bytes();
      problem.request.add_raw(whole.raw(i));
    }
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(problem.request, &response).ok());
    EXPECT_EQ(test::Judge(problem, response), "");
    EXPECT_EQ(response.transport(), shared == 0 ? "inline" : "shm");
    problem.request.add_raw("superfluous");
    ExpectRefused(problem.request, StatusCode::INVALID_ARGUMENT, "entries, must have");
  }
  // Twelve of 24 tensors of 1 KiB were shared; the others and all answers were inline.
  const auto bytes = [&](const char* direction, const char* transport) {
    return server_->Metric(std::string("attend_transport_bytes_total{direction=\"") + direction +
                           "\",transport=\"" + transport + "\"}");
  };
  EXPECT_EQ(bytes("in", "shm"), 12 * 1024);
  EXPECT_GT(bytes("in", "inline"), 12 * 1024);
  EXPECT_LT(bytes("in", "inline"), 13 * 1024 + 8 * 400);
  EXPECT_EQ(bytes("out", "inline"), 8 * (1024 + 64));
  EXPECT_EQ(bytes("out", "shm"), 0);
  EXPECT_EQ(server_->Metric("attend_shared_memory_regions"), 1);
  EXPECT_EQ(server_->Metric("attend_shared_memory_bytes{state=\"open\"}"), 1 << 20);
  client.Close();
  WaitUntilEmpty();
  EXPECT_EQ(server_->Metric("attend_shared_memory_bytes{state=\"open\"}"), 0);
  EXPECT_EQ(server_->Metric("attend_shared_memory_bytes{state=\"changing\"}"), 0);
  EXPECT_EQ(server_->Metric("attend_shared_memory_regions_created_total"), 1);
}

TEST_F(SharedMemoryTest, InputsMayShareTheirBytesWithoutOtherMemory) {
  Start([](Config& config) { config.memory_budget_bytes = 4096; });
  RegionClient client(path());
  const auto region = client.Create(kRegionBytes);
  WireProblem problem = test::PlainWireProblem(5, 512, 64);  // 256 KiB per tensor
  *problem.request.mutable_raw(1) = problem.request.raw(0);
  *problem.request.mutable_raw(2) = problem.request.raw(0);
  const v1::AttendRequest whole = problem.request;
  const int64_t behind = test::PutTensors(*region, 0, &problem.request);
  // q, k and v are one tensor.
  problem.request.mutable_k()->mutable_shared_memory()->set_offset(0);
  problem.request.mutable_v()->mutable_shared_memory()->set_offset(0);
  test::PlaceOutputs(*region, behind, 1 << 20, &problem.request);
  v1::AttendResponse response;
  const grpc::Status status = Attend(problem.request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::AttendResponse shared = test::WithBytes(*region, response);
  client.Close();
  TestServer plain;
  v1::AttendResponse expected;
  grpc::ClientContext context;
  ASSERT_TRUE(plain.Stub()->Attend(&context, whole, &expected).ok());
  EXPECT_TRUE(shared.raw(0) == expected.raw(0));
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, BytesAroundTheAnswerAreUnchanged) {
  Start();
  RegionClient client(path());
  const auto region = client.Create(1 << 16);
  std::memset(region->data(), 0x5a, 1 << 16);
  WireProblem problem = test::PlainWireProblem(6);
  const int64_t behind = test::PutTensors(*region, 0, &problem.request);
  test::PlaceOutputs(*region, behind + 4096, 8192, &problem.request);
  problem.request.set_check(true);  // poisons the output before the kernel runs
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(problem.request, &response).ok());
  const int64_t o = behind + 4096, lse = o + 8192;
  const auto untouched = [&](int64_t from, int64_t to) {
    return std::all_of(region->data() + from, region->data() + to,
                       [](char c) { return c == 0x5a; });
  };
  EXPECT_TRUE(untouched(behind, o));
  EXPECT_TRUE(untouched(o + 1024, lse));
  EXPECT_TRUE(untouched(lse + 64, 1 << 16));
}

TEST_F(SharedMemoryTest, BadPlacesAreRefused) {
  Start();
  RegionClient client(path());
  const auto region = client.Create(65536);
  const WireProblem good = Shared(*region, 7);
  const auto with = [&](const std::function<void(v1::AttendRequest&)>& change) {
    v1::AttendRequest request = good.request;
    change(request);
    return request;
  };
  const auto offset_of_k = [&](uint64_t offset) {
    return with([&](v1::AttendRequest& request) {
      request.mutable_k()->mutable_shared_memory()->set_offset(offset);
    });
  };
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  ExpectRefused(offset_of_k(100), invalid,
                "k.shared_memory.offset is 100, must be a multiple of 256");
  ExpectRefused(offset_of_k(65536), invalid, "with 1024 bytes it must end within the region's");
  ExpectRefused(offset_of_k(65536 - 768), invalid, "k.shared_memory.offset is 64768");
  ExpectRefused(offset_of_k(UINT64_MAX - 255), invalid, "is 18446744073709551360");
  ExpectRefused(offset_of_k(uint64_t{1} << 63), invalid, "k.shared_memory.offset");
  const auto o_at = [&](uint64_t offset) {
    return with([&](v1::AttendRequest& request) {
      request.mutable_o_placement()->mutable_shared_memory()->set_offset(offset);
    });
  };
  ExpectRefused(o_at(65536 - 512), invalid, "o_placement.shared_memory.offset is 65024");
  ExpectRefused(o_at(1024), invalid, "must not overlap k's [1024, 2048)");
  ExpectRefused(o_at(256), invalid, "must not overlap q's [0, 1024)");
  ExpectRefused(with([&](v1::AttendRequest& request) {
                  *request.mutable_lse_placement() = request.o_placement();
                }),
                invalid, "must not overlap O's");
  ExpectRefused(with([](v1::AttendRequest& request) {
                  request.set_return_lse(false);
                  *request.mutable_lse_placement() = request.o_placement();
                }),
                invalid, "lse_placement is set, but lse is not requested");
  ExpectRefused(with([](v1::AttendRequest& request) {
                  request.mutable_q()->mutable_shared_memory()->set_region("short");
                }),
                invalid, "q.shared_memory.region has 5 bytes, must have 16");
  ExpectRefused(with([](v1::AttendRequest& request) {
                  request.mutable_v()->mutable_shared_memory()->set_region(std::string(16, 'x'));
                }),
                StatusCode::NOT_FOUND, "v.shared_memory.region names no region");
  // Places of later versions, in field numbers that this server does not know.
  ExpectRefused(with([](v1::AttendRequest& request) {
                  request.mutable_o_placement()->ParseFromString(std::string("\x12\x00", 2));
                }),
                StatusCode::UNIMPLEMENTED, "o_placement is field 2");
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(good.request, &response).ok()) << "the last place that fits, fits";
  ASSERT_TRUE(Attend(offset_of_k(65536 - 1024), &response).ok());
  client.Close();
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, ChunkedRequestsWithRegionsAreRefused) {
  Start();
  const auto expect = [&](const std::function<void(v1::AttendRequest&)>& change,
                          const std::string& part) {
    v1::AttendChunkedRequest message;
    *message.mutable_header() = test::PlainWireProblem(10).request;
    message.mutable_header()->clear_raw();
    for (v1::Tensor* tensor :
         {message.mutable_header()->mutable_q(), message.mutable_header()->mutable_k(),
          message.mutable_header()->mutable_v()}) {
      tensor->mutable_chunked();
    }
    change(*message.mutable_header());
    grpc::ClientContext context;
    const auto stream = stub_->AttendChunked(&context);
    stream->Write(message);
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find(part), std::string::npos) << status.error_message();
  };
  expect(
      [](v1::AttendRequest& header) {
        header.mutable_k()->mutable_shared_memory()->set_region(std::string(16, 'x'));
      },
      "k.source is not chunked");
  expect(
      [](v1::AttendRequest& header) {
        header.mutable_o_placement()->mutable_shared_memory()->set_region(std::string(16, 'x'));
      },
      "o_placement is set, must be unset in AttendChunked");
}

TEST_F(SharedMemoryTest, StreamsAcceptRegions) {
  Start();
  RegionClient client(path());
  grpc::ClientContext context;
  const auto stream = stub_->AttendStream(&context);
  std::vector<std::unique_ptr<MappedRegion>> regions;
  std::vector<WireProblem> problems;
  for (uint64_t i = 0; i < 8; ++i) {
    regions.push_back(client.Create(65536));
    problems.push_back(Shared(*regions.back(), i));
    problems.back().request.set_request_id(std::to_string(i));
    if (i == 5) problems.back().request.mutable_v()->mutable_shared_memory()->set_offset(1);
    ASSERT_TRUE(stream->Write(problems.back().request));
  }
  stream->WritesDone();
  v1::AttendResponse response;
  int answers = 0;
  while (stream->Read(&response)) {
    ++answers;
    const size_t i = static_cast<size_t>(std::stoi(response.request_id()));
    if (i == 5) {
      EXPECT_EQ(response.status().code(), static_cast<int>(Code::kInvalidArgument));
      continue;
    }
    EXPECT_EQ(response.status().code(), 0) << response.status().message();
    EXPECT_EQ(test::Judge(problems[i], test::WithBytes(*regions[i], response)), "");
  }
  EXPECT_EQ(answers, 8);
  EXPECT_TRUE(stream->Finish().ok());
  client.Close();
  WaitUntilEmpty();
}

}  // namespace
}  // namespace attend
