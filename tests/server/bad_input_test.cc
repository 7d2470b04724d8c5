// SPDX-License-Identifier: Apache-2.0
//
// Every way a request can be wrong, sent to a real server: each gets its status and a message that
// names field, value and bound, changes nothing else, and the next good request is answered.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/server/messages.h"
#include "tests/server/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

constexpr auto kHuge = std::numeric_limits<int64_t>::max();

struct BadRequest {
  const char* name;
  std::function<void(v1::AttendRequest&)> spoil;  // of a B1 H2 L8 D16 fp32 BHLD request
  std::vector<std::string> says;                  // all in the message
  StatusCode code = StatusCode::INVALID_ARGUMENT;
};

void SetDim(v1::Tensor* tensor, int i, int64_t dim) { tensor->set_shape(i, dim); }

// Turns the request into LHD with two sequences of 3 + 5 rows. Shapes keep their element count.
void MakePacked(v1::AttendRequest& r) {
  r.set_layout(v1::LAYOUT_LHD);
  for (v1::Tensor* tensor : {r.mutable_q(), r.mutable_k(), r.mutable_v()}) {
    tensor->mutable_shape()->Clear();
    for (const int64_t dim : {8, 2, 16}) tensor->add_shape(dim);
  }
  for (const int64_t row : {0, 3, 8}) {
    r.add_cu_q(row);
    r.add_cu_kv(row);
  }
}

v1::Tensor* AddBias(v1::AttendRequest& r, std::vector<int64_t> shape) {
  v1::Tensor* bias = r.mutable_bias();
  bias->set_dtype(v1::DTYPE_FLOAT32);
  bias->mutable_shape()->Assign(shape.begin(), shape.end());
  r.add_raw(std::string(2 * 8 * 8 * 4, '\0'));
  return bias;
}

std::vector<BadRequest> BadShapes() {
  return {
      {"no q", [](auto& r) { r.clear_q(); }, {"q is not set"}},
      {"no v", [](auto& r) { r.clear_v(); }, {"v is not set"}},
      {"rank 3",
       [](auto& r) { r.mutable_q()->mutable_shape()->RemoveLast(); },
       {"q.shape [1, 2, 8] has 3 dimensions, must have 4: [B, Hq, Lq, D]"}},
      {"rank 3 in BLHD",
       [](auto& r) {
         r.set_layout(v1::LAYOUT_BLHD);
         r.mutable_v()->add_shape(1);
       },
       {"v.shape", "has 5 dimensions, must have 4: [B, Lk, Hkv, Dv]"}},
      {"negative",
       [](auto& r) { SetDim(r.mutable_k(), 2, -8); },
       {"k.shape[2] is -8, must be at least 0"}},
      {"most negative", [](auto& r) { SetDim(r.mutable_q(), 0, -kHuge - 1); }, {"q.shape[0]"}},
      {"overflow",
       [](auto& r) {
         SetDim(r.mutable_q(), 2, int64_t{1} << 40);
         SetDim(r.mutable_q(), 0, int64_t{1} << 40);
       },
       {"q.shape", "overflows 64 bits"}},
      {"overflow by one dimension",
       [](auto& r) { SetDim(r.mutable_q(), 2, kHuge); },
       {"q.shape", "overflows 64 bits"}},
      {"huge and empty",
       [](auto& r) {
         for (v1::Tensor* t : {r.mutable_q(), r.mutable_k(), r.mutable_v()}) SetDim(t, 0, 0);
         SetDim(r.mutable_q(), 2, kHuge);
         for (int i = 0; i < 3; ++i) r.mutable_raw(i)->clear();
       },
       {"query length Lq is 9223372036854775807, must be in [0, "}},
      {"head counts",
       [](auto& r) {
         SetDim(r.mutable_k(), 1, 3);
         SetDim(r.mutable_v(), 1, 3);
       },
       {"Hq is 2, must be a multiple of key/value heads Hkv 3"}},
      {"no heads", [](auto& r) { SetDim(r.mutable_q(), 1, 0); }, {"query heads Hq is 0"}},
      {"no kv heads",
       [](auto& r) {
         SetDim(r.mutable_k(), 1, 0);
         SetDim(r.mutable_v(), 1, 0);
       },
       {"Hkv is 0, must be in [1, "}},
      {"batches differ",
       [](auto& r) { SetDim(r.mutable_k(), 0, 2); },
       {"k.shape[0] (B) is 2, must equal q's 1"}},
      {"v heads differ",
       [](auto& r) { SetDim(r.mutable_v(), 1, 1); },
       {"v.shape[1] (Hkv) is 1, must equal k's 2"}},
      {"v length differs",
       [](auto& r) { SetDim(r.mutable_v(), 2, 9); },
       {"v.shape[2] (Lk) is 9, must equal k's 8"}},
      {"D differs",
       [](auto& r) { SetDim(r.mutable_k(), 3, 15); },
       {"k.shape[3] (D) is 15, must equal q's 16"}},
      {"D 0",
       [](auto& r) {
         SetDim(r.mutable_q(), 3, 0);
         SetDim(r.mutable_k(), 3, 0);
       },
       {"head dim D is 0, must be in [1, 256]"}},
      {"D 257",
       [](auto& r) {
         SetDim(r.mutable_q(), 3, 257);
         SetDim(r.mutable_k(), 3, 257);
       },
       {"head dim D is 257, must be in [1, 256]"}},
      {"Dv 257",
       [](auto& r) { SetDim(r.mutable_v(), 3, 257); },
       {"value head dim Dv is 257, must be in [1, 256]"}},
  };
}

std::vector<BadRequest> BadBytes() {
  return {
      {"byte_length short",
       [](auto& r) { r.mutable_q()->set_byte_length(1020); },
       {"q.byte_length is 1020, must be 1024 for shape [1, 2, 8, 16] of float32"}},
      {"byte_length 2^64 - 1",
       [](auto& r) { r.mutable_v()->set_byte_length(UINT64_MAX); },
       {"v.byte_length is 18446744073709551615, must be 1024"}},
      {"raw short",
       [](auto& r) { r.mutable_raw(0)->pop_back(); },
       {"raw[0] has 1023 bytes, must have 1024, the bytes of q"}},
      {"raw long",
       [](auto& r) { r.mutable_raw(2)->push_back('x'); },
       {"raw[2] has 1025 bytes, must have 1024, the bytes of v"}},
      {"raw missing", [](auto& r) { r.clear_raw(); }, {"raw has 0 entries, must have 3"}},
      {"raw too many", [](auto& r) { r.add_raw("x"); }, {"raw has 4 entries, must have 3"}},
      {"4 GiB declared, little sent",
       [](auto& r) {
         SetDim(r.mutable_q(), 2, (int64_t{4} << 30) / 128);
         r.mutable_raw(0)->resize(4);
       },
       {"raw[0] has 4 bytes, must have 4294967296, the bytes of q"}},
      {"bytes elsewhere",
       [](auto& r) {
         v1::Tensor::GetReflection()->MutableUnknownFields(r.mutable_k())->AddVarint(7, 1);
       },
       {"k.source is field 7, this server knows inline_bytes only"},
       StatusCode::UNIMPLEMENTED},
  };
}

std::vector<BadRequest> BadValues() {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto inf = std::numeric_limits<float>::infinity();
  return {
      {"no dtype",
       [](auto& r) { r.mutable_q()->clear_dtype(); },
       {"q.dtype is 0, must be FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)"}},
      {"unknown dtype",
       [](auto& r) { r.mutable_k()->set_dtype(static_cast<v1::DType>(77)); },
       {"k.dtype is 77"}},
      {"negative dtype",
       [](auto& r) { r.mutable_v()->set_dtype(static_cast<v1::DType>(-1)); },
       {"v.dtype is -1"}},
      {"mixed dtypes",
       [](auto& r) {
         r.mutable_v()->set_dtype(v1::DTYPE_FLOAT16);
         r.mutable_raw(2)->resize(512);
       },
       {"v.dtype is float16, must equal q.dtype float32"}},
      {"unknown layout",
       [](auto& r) { r.set_layout(static_cast<v1::Layout>(9)); },
       {"layout is 9, must be BHLD (1), BLHD (2) or LHD (3)"}},
      {"unknown mask",
       [](auto& r) { r.mutable_mask()->set_kind(static_cast<v1::Mask::Kind>(6)); },
       {"mask.kind is 6, must be in [0, 5]"}},
      {"window without a window",
       [](auto& r) { r.mutable_mask()->set_window_left(3); },
       {"mask.window_left is 3, must be unset"}},
      {"right window of a causal mask",
       [](auto& r) {
         r.mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL_TOP_LEFT);
         r.mutable_mask()->set_window_right(0);
       },
       {"mask.window_right is 0, must be unset"}},
      {"window -2",
       [](auto& r) {
         r.mutable_mask()->set_kind(v1::Mask::KIND_WINDOW_TOP_LEFT);
         r.mutable_mask()->set_window_left(-2);
       },
       {"mask.window_left is -2, must be at least 0, or -1 for no bound"}},
      {"scale nan", [=](auto& r) { r.set_scale(nan); }, {"scale is", "must be finite"}},
      {"scale inf", [=](auto& r) { r.set_scale(-inf); }, {"scale is -inf, must be finite"}},
      {"softcap negative",
       [](auto& r) { r.set_softcap(-1); },
       {"softcap is -1", "must be in [0, "}},
      {"softcap nan", [=](auto& r) { r.set_softcap(nan); }, {"softcap is", "must be in [0, "}},
      {"softcap large", [](auto& r) { r.set_softcap(2e6f); }, {"softcap is 2000000"}},
      {"priority",
       [](auto& r) { r.set_priority(101); },
       {"priority is 101, must be in [-100, 100]"}},
      {"request_id",
       [](auto& r) { r.set_request_id(std::string(129, 'i')); },
       {"request_id has 129 bytes, must have at most 128"}},
      {"kernel",
       [](auto& r) { r.set_kernel("warp_drive"); },
       {"kernel is \"warp_drive\", must be one of auto, cpu_reference"}},
      {"kernel of another device",
       [](auto& r) { r.set_kernel("cuda_naive"); },
       {"kernel cuda_naive does not run on cpu"},
       StatusCode::UNIMPLEMENTED},
      {"slopes",
       [](auto& r) {
         for (int i = 0; i < 3; ++i) r.add_alibi_slopes(1);
       },
       {"alibi_slopes has 3 entries, must have Hq = 2, B * Hq = 2, or 0"}},
      {"sinks", [](auto& r) { r.add_sinks(1); }, {"sinks has 1 entries, must have Hq = 2, or 0"}},
  };
}

std::vector<BadRequest> BadLengths() {
  return {
      {"lengths beyond",
       [](auto& r) { r.add_q_lengths(9); },
       {"q_lengths[0] is 9, must be in [0, Lq = 8]"}},
      {"negative length",
       [](auto& r) { r.add_kv_lengths(-1); },
       {"kv_lengths[0] is -1, must be in [0, Lk = 8]"}},
      {"too many lengths",
       [](auto& r) {
         r.add_kv_lengths(1);
         r.add_kv_lengths(1);
       },
       {"kv_lengths has 2 entries, must have B = 1, or 0"}},
      {"cu in a dense layout", [](auto& r) { r.add_cu_q(0); }, {"cu_q has 1 entries", "LHD"}},
      {"packed without cu",
       [](auto& r) {
         MakePacked(r);
         r.clear_cu_q();
       },
       {"cu_q has 0 entries, must have B + 1 in layout LHD"}},
      {"cu not from 0",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_kv(0, 1);
       },
       {"cu_kv[0] is 1, must be 0"}},
      {"cu falls",
       [](auto& r) {
         MakePacked(r);
         r.mutable_cu_q()->Add(5);
         r.mutable_cu_q()->Add(8);
       },
       {"cu_q[3] is 5, must be in [8, 8]"}},
      {"cu overshoots",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_q(1, 9);
       },
       {"cu_q[1] is 9, must be in [0, 8]"}},
      {"cu huge",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_kv(1, kHuge);
       },
       {"cu_kv[1] is 9223372036854775807, must be in [0, 8]"}},
      {"cu ends early",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_q(2, 7);
       },
       {"cu_q[2] is 7, must equal the rows 8"}},
      {"cu counts differ",
       [](auto& r) {
         MakePacked(r);
         r.add_cu_kv(8);
       },
       {"cu_kv has 4 entries, must have as many as cu_q, 3"}},
      {"lengths in LHD",
       [](auto& r) {
         MakePacked(r);
         r.add_q_lengths(1);
       },
       {"q_lengths has 1 entries, must have none in layout LHD"}},
      {"bias rank",
       [](auto& r) {
         AddBias(r, {2, 8, 8});
       },
       {"bias.shape", "must have 4"}},
      {"bias heads",
       [](auto& r) {
         AddBias(r, {1, 3, 8, 8});
       },
       {"bias.shape[1] is 3, must be Hq = 2 or 1"}},
      {"bias keys",
       [](auto& r) {
         AddBias(r, {1, 2, 8, 1});
       },
       {"bias.shape[3] is 1, must be Lk = 8"}},
      {"bias dtype",
       [](auto& r) {
         AddBias(r, {1, 2, 8, 8})->clear_dtype();
       },
       {"bias.dtype is 0"}},
      {"bias bytes",
       [](auto& r) {
         AddBias(r, {1, 1, 8, 8});
       },
       {"raw[3] has 512 bytes, must have 256, the bytes of bias"}},
  };
}

class BadInputTest : public ::testing::Test {
 protected:
  void ExpectGoodAnswer() {
    WireProblem good = test::PlainWireProblem(random_());
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->Attend(&context, good.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(good, response), "");
    EXPECT_EQ(response.request_id(), good.request.request_id());
  }

  void ExpectNothingHeld() {
    // Counted down, and memory given back, a moment after the client has its answer.
    while (server_.server().engine().inflight() > 0) usleep(100);
    while (server_.server().engine().host_pool().used_bytes() > 0) usleep(100);
  }

  void Try(const std::vector<BadRequest>& bad_requests) {
    for (const BadRequest& bad : bad_requests) {
      SCOPED_TRACE(bad.name);
      v1::AttendRequest request = test::PlainWireProblem(random_()).request;
      bad.spoil(request);
      const int64_t accepted = server_.backend().submitted_items();
      v1::AttendResponse response;
      grpc::ClientContext context;
      const grpc::Status status = stub_->Attend(&context, request, &response);
      EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
      for (const std::string& part : bad.says) {
        EXPECT_NE(status.error_message().find(part), std::string::npos)
            << "\"" << part << "\" is not in \"" << status.error_message() << "\"";
      }
      EXPECT_EQ(server_.backend().submitted_items(), accepted);
      ExpectGoodAnswer();
    }
    ExpectNothingHeld();
  }

  std::mt19937_64 random_{test::FreshSeed()};
  TestServer server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_ = server_.Stub();
};

TEST_F(BadInputTest, Shapes) { Try(BadShapes()); }
TEST_F(BadInputTest, Bytes) { Try(BadBytes()); }
TEST_F(BadInputTest, Values) { Try(BadValues()); }
TEST_F(BadInputTest, Lengths) { Try(BadLengths()); }

TEST(BadInputMetricsTest, AreCountedAndLogged) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const auto stub = server.Stub();
  v1::AttendRequest request = test::PlainWireProblem(1).request;
  request.set_request_id("the\nclient's");
  request.set_priority(1000);
  v1::AttendResponse response;
  grpc::ClientContext context;
  EXPECT_FALSE(stub->Attend(&context, request, &response).ok());
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"invalid\"}"), 1);
  const std::string log = server.log();
  EXPECT_NE(log.find("request_id=the\nclient's code=INVALID_ARGUMENT"), std::string::npos) << log;
  EXPECT_NE(log.find("peer=ipv4:127.0.0.1:"), std::string::npos) << log;
}

TEST_F(BadInputTest, TruncatedAndRandomBytes) {
  const std::shared_ptr<grpc::Channel> channel = server_.Connect();
  const std::string good = test::PlainWireProblem(2, 2, 2).request.SerializeAsString();
  v1::AttendResponse response;
  for (size_t length = 0; length < good.size(); ++length) {
    const grpc::Status status = test::SendBytes(channel, good.substr(0, length), &response);
    ASSERT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << "cut at " << length;
    ASSERT_FALSE(status.error_message().empty());
  }
  for (int i = 0; i < 500; ++i) {
    std::string bytes(random_() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    const grpc::Status status = test::SendBytes(channel, bytes, &response);
    ASSERT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  }
  ASSERT_TRUE(test::SendBytes(channel, good, &response).ok());
  ExpectNothingHeld();
}

TEST_F(BadInputTest, LyingLengthOverTheWire) {
  v1::AttendRequest header = test::PlainWireProblem(3).request;
  header.clear_raw();
  const std::string lying =
      header.SerializeAsString() + std::string("\xc2\x3e\x80\x80\x80\x80\x10", 7) + "abcd";
  v1::AttendResponse response;
  const grpc::Status status = test::SendBytes(server_.Connect(), lying, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("declares 4294967296 bytes, 4 are left"), std::string::npos)
      << status.error_message();
  ExpectGoodAnswer();
}

TEST_F(BadInputTest, EmptyTensorsAreFine) {
  for (const auto& [len_q, len_k, batch] : {std::tuple{0, 8, 1}, {8, 0, 1}, {0, 0, 1}, {8, 8, 0}}) {
    WireProblem problem;
    problem.spec = test::MakeSpec(batch, 2, 1, len_q, len_k, 16, 8);
    problem.owned = test::MakeAttention(problem.spec, 5);
    problem.request = test::ToRequest(problem.spec, problem.owned);
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, response), "");
  }
}

TEST_F(BadInputTest, NanAndInfDataAreComputed) {
  WireProblem problem = test::PlainWireProblem(6);
  const Attention& a = problem.owned.attention;
  test::Set(a, problem.owned.Q(0, 0, 1, 2), std::numeric_limits<float>::quiet_NaN());
  test::Set(a, problem.owned.V(0, 1, 3, 0), std::numeric_limits<float>::infinity());
  problem.request = test::ToRequest(problem.spec, problem.owned);
  v1::AttendResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->Attend(&context, problem.request, &response).ok());
  EXPECT_EQ(test::Judge(problem, response), "");
  const auto* o = reinterpret_cast<const float*>(response.raw(0).data());
  EXPECT_TRUE(std::isnan(o[16]));  // head 0, row 1
  EXPECT_FALSE(std::isnan(o[0]));  // head 0, row 0
  ExpectGoodAnswer();
}

TEST_F(BadInputTest, CompressedMessagesAreRefusedCleanly) {
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    v1::AttendRequest request = test::PlainWireProblem(7, 64, 64).request;
    v1::AttendResponse response;
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    const grpc::Status status = stub_->Attend(&context, request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED) << status.error_message();
    EXPECT_NE(status.error_message().find("ompression"), std::string::npos)
        << status.error_message();
    ExpectGoodAnswer();
  }
}

}  // namespace
}  // namespace attend
