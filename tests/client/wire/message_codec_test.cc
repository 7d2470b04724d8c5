// SPDX-License-Identifier: Apache-2.0
//
// The hand-written encoder produces the same bytes as the generated classes, and the decoder reads
// their output with fields in any order and cut into any slices.

#include "client/wire/message_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>

#include "client/call/random.h"
#include "client/tool/call_spec.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

std::string Bytes(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Cut at random places.
grpc::ByteBuffer Fragmented(const std::string& bytes, Random& random) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min(bytes.size() - at, static_cast<size_t>(1 + random.Below(50)));
    slices.emplace_back(bytes.substr(at, size));
    at += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::AttendRequest Generated(const AttentionCall& call, const std::string& id) {
  v1::AttendRequest request = RequestHeader(call);
  request.set_request_id(id);
  for (const TensorRef* tensor : {&call.q, &call.k, &call.v}) {
    request.add_raw(tensor->data, static_cast<size_t>(tensor->bytes));
  }
  if (call.bias) request.add_raw(call.bias->data, static_cast<size_t>(call.bias->bytes));
  return request;
}

AttentionCall RandomCall(const char* text, uint64_t seed) {
  const Result<CallSpec> spec = ParseCallSpec(text);
  EXPECT_TRUE(spec.ok()) << spec.status().ToString();
  Result<AttentionCall> call = MakeRandomCall(*spec, seed);
  EXPECT_TRUE(call.ok()) << call.status().ToString();
  return *call;
}

// Small tensors are copied into the message, large ones are not: both, and a mix.
constexpr const char* kShapes[] = {
    "B1,H1,L1,D1",
    "B2,H4,Hkv2,L100,D64,causal,window=7:-1,lse",
    "B1,H2,L300,D64,bias,alibi,sinks,softcap=30,scale=0.5,kernel=cpu_reference",
    "B1,H1,Lq1,Lk3000,D16,dtype=bfloat16,top-left",
    "B3,H2,L77,D64,layout=lhd,ragged,dtype=float16,bias",
    "B3,H2,L40,D64,layout=blhd,ragged,window=3:5,bits,dropout=0.1",
    "B2,H2,L40,D64,ragged,tree=17",
    "B1,H1,Lq0,Lk4,D8",
    "B1,H1,Lq4,Lk0,D8",
};

TEST(EncodeRequest, EqualsTheGeneratedClasses) {
  ATTEND_FRESH_SEED(seed);
  for (const char* text : kShapes) {
    AttentionCall call = RandomCall(text, seed);
    call.check = true;
    call.priority = -7;
    const Result<EncodedCall> encoded = EncodedCall::Make(call);
    ASSERT_TRUE(encoded.ok()) << text;
    for (const std::string& id : {std::string(), std::string("a"), std::string(21, 'b'),
                                  std::string(128, 'c'), std::string(500, 'd')}) {
      const v1::AttendRequest expected = Generated(call, id);
      const std::string bytes = Bytes(encoded->ToByteBuffer(id));
      EXPECT_EQ(bytes, expected.SerializeAsString()) << text << ", id of " << id.size();
      v1::AttendRequest parsed;
      ASSERT_TRUE(parsed.ParseFromString(bytes)) << text;
      EXPECT_EQ(parsed.raw_size(), call.bias ? 4 : 3);
    }
    EXPECT_EQ(encoded->payload_bytes(), PayloadBytes(call));
  }
}

TEST(EncodeRequest, OmitsDefaults) {
  const AttentionCall call = RandomCall("B1,H1,L1,D1", 1);
  const v1::AttendRequest header = RequestHeader(call);
  EXPECT_FALSE(header.has_scale());
  EXPECT_FALSE(header.has_mask());
  EXPECT_EQ(header.raw_size(), 0);
}

TEST(EncodeRequest, SendsFromTheCallersMemory) {
  const AttentionCall call = RandomCall("B1,H1,L1000,D64", 1);
  const Result<EncodedCall> encoded = EncodedCall::Make(call);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(encoded->ToByteBuffer("id").Dump(&slices).ok());
  int borrowed = 0;
  for (const grpc::Slice& slice : slices) {
    for (const TensorRef* tensor : {&call.q, &call.k, &call.v}) {
      borrowed += static_cast<const void*>(slice.begin()) == tensor->data &&
                  static_cast<int64_t>(slice.size()) == tensor->bytes;
    }
  }
  EXPECT_EQ(borrowed, 3);
}

TEST(EncodeRequest, ReleasesOwnersWithTheLastBuffer) {
  std::vector<float> memory(3 * 20000, 1.0f);
  std::atomic<int> released{0};
  AttentionCall call;
  const auto tensor = [&](int index) {
    TensorRef ref(DType::kFloat32, {1, 1, 200, 100}, memory.data() + index * 20000, 80000);
    ref.owner = std::shared_ptr<const void>(nullptr, [&](const void*) { ++released; });
    return ref;
  };
  call.q = tensor(0);
  call.k = tensor(1);
  call.v = tensor(2);
  grpc::ByteBuffer buffer;
  std::atomic<bool> kept_alive{true};
  {
    std::shared_ptr<const void> keep(nullptr, [&](const void*) { kept_alive = false; });
    Result<EncodedCall> encoded = EncodedCall::Make(call, std::move(keep));
    ASSERT_TRUE(encoded.ok());
    EXPECT_TRUE(encoded->owned());
    buffer = encoded->ToByteBuffer("x");
    call = AttentionCall();
  }
  EXPECT_EQ(released, 0);
  EXPECT_TRUE(kept_alive);
  buffer.Clear();
  EXPECT_EQ(released, 3);
  EXPECT_FALSE(kept_alive);
}

TEST(EncodeRequest, DetectsTensorsWithoutAnOwner) {
  AttentionCall call = RandomCall("B1,H1,L1000,D64", 1);
  const TensorRef q = call.q;
  call.q = TensorRef(q.dtype, q.shape, q.data, q.bytes);
  EXPECT_FALSE(EncodedCall::Make(call)->owned());
  const AttentionCall kept = RandomCall("B1,H1,L2,D4", 1);
  call = kept;
  call.q.owner = nullptr;
  EXPECT_TRUE(EncodedCall::Make(call)->owned()) << "small tensors are copied";
}

TEST(EncodeRequest, RefusesCallsTooLargeForAMessage) {
  AttentionCall call = RandomCall("B1,H1,L1,D1", 1);
  call.k.bytes = int64_t{3} << 30;
  const Result<EncodedCall> encoded = EncodedCall::Make(call);
  ASSERT_FALSE(encoded.ok());
  EXPECT_EQ(encoded.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(encoded.status().message(), HasSubstr("2147483647"));
}

// O has 1 MiB here, and the LSE 64 KiB.
TEST(EncodeRequest, AnAnswersLseCountsToo) {
  ATTEND_FRESH_SEED(seed);
  for (const bool lse : {false, true}) {
    const std::string text = "B1,H1,L16384,Lk1,D16" + std::string(lse ? ",lse" : "");
    const Result<EncodedCall> encoded = EncodedCall::Make(RandomCall(text.c_str(), seed));
    ASSERT_TRUE(encoded.ok()) << encoded.status().ToString();
    EXPECT_EQ(encoded->CheckMessageBytes((1 << 20) + (1 << 15)).ok(), !lse);
  }
}

TEST(CallFromRequest, ReversesEncodeRequest) {
  ATTEND_FRESH_SEED(seed);
  for (const char* text : kShapes) {
    const AttentionCall call = RandomCall(text, seed);
    const auto request = std::make_shared<const v1::AttendRequest>(Generated(call, "an-id"));
    const Result<AttentionCall> back = CallFromRequest(request);
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    EXPECT_EQ(back->request_id, "an-id");
    const Result<EncodedCall> encoded = EncodedCall::Make(*back);
    EXPECT_EQ(Bytes(encoded->ToByteBuffer("an-id")), request->SerializeAsString()) << text;
  }
  const auto empty = std::make_shared<const v1::AttendRequest>();
  EXPECT_FALSE(CallFromRequest(empty).ok());
}

v1::AttendResponse RandomResponse(Random& random, bool lse) {
  v1::AttendResponse m;
  m.set_request_id("r-17");
  m.mutable_o()->set_dtype(v1::DTYPE_FLOAT16);
  for (const int dim : {1, 2, 33, 64}) m.mutable_o()->add_shape(dim);
  m.mutable_o()->mutable_inline_bytes();
  std::string raw(2 * 33 * 64 * 2, '\0');
  for (char& c : raw) c = static_cast<char>(random.Bits());
  m.add_raw(raw);
  if (lse) {
    m.mutable_lse()->set_dtype(v1::DTYPE_FLOAT32);
    for (const int dim : {1, 2, 33}) m.mutable_lse()->add_shape(dim);
    m.add_raw(raw.substr(0, 2 * 33 * 4));
  }
  v1::Timings* t = m.mutable_timings();
  t->set_receive_ns(1);
  t->set_queue_ns(2);
  t->set_copy_in_ns(3);
  t->set_kernel_ns(4);
  t->set_copy_out_ns(5);
  t->set_check_ns(6);
  t->set_total_ns(int64_t{7} << 40);
  m.set_batch_requests(8);
  m.set_kernel("cpu_flash");
  m.set_kernel_reason("asked for");
  m.set_device("cpu");
  m.set_transport("inline");
  v1::CheckReport* c = m.mutable_check();
  c->set_ok(true);
  c->set_rows_checked(9);
  c->set_rows_total(66);
  c->set_rows_wide(4);
  c->set_rows_unjudged(3);
  c->set_undecided(true);
  c->set_max_abs_error(0.5);
  c->set_mean_abs_error(0.25);
  c->set_bound(1.5);
  c->set_detail("none");
  return m;
}

void ExpectDecoded(const v1::AttendResponse& m, const DecodedResponse& decoded) {
  const AttentionResult& r = decoded.result;
  EXPECT_FALSE(decoded.has_status);
  EXPECT_EQ(r.request_id, m.request_id());
  EXPECT_EQ(r.o.dtype, DType::kFloat16);
  EXPECT_EQ(ShapeText(r.o.shape), "[1, 2, 33, 64]");
  ASSERT_EQ(r.o.bytes, static_cast<int64_t>(m.raw(0).size()));
  EXPECT_EQ(std::memcmp(r.o.data.get(), m.raw(0).data(), m.raw(0).size()), 0);
  ASSERT_EQ(r.lse.has_value(), m.has_lse());
  if (r.lse) {
    ASSERT_EQ(r.lse->bytes, static_cast<int64_t>(m.raw(1).size()));
    EXPECT_EQ(std::memcmp(r.lse->data.get(), m.raw(1).data(), m.raw(1).size()), 0);
  }
  EXPECT_EQ(r.timings.receive_ns, 1);
  EXPECT_EQ(r.timings.queue_ns, 2);
  EXPECT_EQ(r.timings.copy_in_ns, 3);
  EXPECT_EQ(r.timings.kernel_ns, 4);
  EXPECT_EQ(r.timings.copy_out_ns, 5);
  EXPECT_EQ(r.timings.check_ns, 6);
  EXPECT_EQ(r.timings.total_ns, int64_t{7} << 40);
  EXPECT_EQ(r.batch_requests, 8);
  EXPECT_EQ(r.kernel, "cpu_flash");
  EXPECT_EQ(r.kernel_reason, "asked for");
  EXPECT_EQ(r.device, "cpu");
  EXPECT_EQ(r.transport, "inline");
  ASSERT_TRUE(r.check && r.check->ok && r.check->undecided);
  EXPECT_EQ(r.check->rows_checked, 9);
  EXPECT_EQ(r.check->rows_total, 66);
  EXPECT_EQ(r.check->rows_wide, 4);
  EXPECT_EQ(r.check->rows_unjudged, 3);
  EXPECT_TRUE(r.check->max_abs_error == 0.5 && r.check->mean_abs_error == 0.25);
  EXPECT_EQ(r.check->bound, 1.5);
  EXPECT_EQ(r.check->detail, "none");
}

TEST(DecodeResponse, ReadsTheGeneratedClassesOutput) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (const bool lse : {false, true}) {
    const v1::AttendResponse message = RandomResponse(random, lse);
    grpc::ByteBuffer buffer = Fragmented(message.SerializeAsString(), random);
    const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kCopy);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    ExpectDecoded(message, *decoded);
    EXPECT_FALSE(buffer.Valid()) << "the buffer is cleared";
    EXPECT_EQ(decoded->payload_bytes, 2 * 33 * 64 * 2 + (lse ? 2 * 33 * 4 : 0));
  }
}

TEST(DecodeResponse, ReadsFieldsInAnyOrder) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  const v1::AttendResponse message = RandomResponse(random, true);
  v1::AttendResponse only_raw, no_raw = message;
  *only_raw.mutable_raw() = message.raw();
  no_raw.clear_raw();
  grpc::ByteBuffer buffer =
      Fragmented(only_raw.SerializeAsString() + no_raw.SerializeAsString(), random);
  const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kCopy);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  ExpectDecoded(message, *decoded);
}

TEST(DecodeResponse, SkipsFieldsOfLaterVersions) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  const v1::AttendResponse message = RandomResponse(random, false);
  // Fields 500 to 503, one of each wire type that proto3 has.
  std::string later(
      "\xa0\x1f\x07\xa9\x1f"
      "12345678"
      "\xb2\x1f\x03"
      "abc"
      "\xbd\x1f"
      "1234",
      25);
  grpc::ByteBuffer buffer = Fragmented(later + message.SerializeAsString(), random);
  const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kCopy);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  ExpectDecoded(message, *decoded);
}

TEST(DecodeResponse, DiscardKeepsEverythingButTheData) {
  Random random(1);
  grpc::ByteBuffer buffer = BufferOf(RandomResponse(random, true).SerializeAsString());
  const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kDiscard);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->payload_bytes, 2 * 33 * 64 * 2 + 2 * 33 * 4);
  EXPECT_EQ(decoded->result.o.data, nullptr);
  EXPECT_EQ(decoded->result.o.bytes, 2 * 33 * 64 * 2);
}

TEST(DecodeResponse, ReadsStatusesOfStreams) {
  v1::AttendResponse message;
  message.set_request_id("x");
  message.mutable_status()->set_code(8);
  message.mutable_status()->set_message("queue is full");
  message.mutable_status()->set_retry_after_ms(25);
  grpc::ByteBuffer buffer = BufferOf(message.SerializeAsString());
  const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kCopy);
  ASSERT_TRUE(decoded.ok());
  EXPECT_TRUE(decoded->has_status);
  EXPECT_EQ(decoded->status.code(), Code::kResourceExhausted);
  EXPECT_EQ(decoded->status.message(), "queue is full");
  EXPECT_EQ(decoded->retry_after_ms, 25);
  EXPECT_EQ(decoded->result.request_id, "x");
}

TEST(DecodeResponse, RefusesMismatchedAnswers) {
  Random random(1);
  const v1::AttendResponse good = RandomResponse(random, true);
  const auto refused = [](const std::string& bytes) {
    grpc::ByteBuffer buffer = BufferOf(bytes);
    const Result<DecodedResponse> decoded = DecodeResponse(&buffer, Payload::kCopy);
    return !decoded.ok() && decoded.status().code() == Code::kInternal;
  };
  const auto spoiled = [&](const std::function<void(v1::AttendResponse&)>& spoil) {
    v1::AttendResponse message = good;
    spoil(message);
    return refused(message.SerializeAsString());
  };
  EXPECT_FALSE(spoiled([](auto&) {}));
  EXPECT_TRUE(spoiled([](auto& m) { m.clear_o(); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.clear_raw(); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.clear_lse(); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.mutable_raw(0)->pop_back(); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.add_raw("third"); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.mutable_o()->set_dtype(v1::DTYPE_UNSPECIFIED); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.mutable_o()->set_shape(0, -1); }));
  EXPECT_TRUE(spoiled([](auto& m) { m.mutable_o()->set_shape(0, int64_t{1} << 62); }));
  // In shared memory, which the call did not name.
  EXPECT_TRUE(spoiled([](auto& m) {
    m.mutable_o()->mutable_shared_memory()->set_region(std::string(16, 'x'));
    m.mutable_raw()->DeleteSubrange(0, 1);
  }));
  EXPECT_TRUE(refused(""));
  // A length far beyond the message must not be believed.
  EXPECT_TRUE(refused(std::string("\xc2\x3e\xff\xff\xff\xff\x07", 7)));
  // After a failure, which is complete: a tag that does not end, and one that ends too late.
  EXPECT_FALSE(refused("\x12\x02\x08\x08"));
  EXPECT_TRUE(refused("\x12\x02\x08\x08\x8b"));
  EXPECT_TRUE(refused("\x12\x02\x08\x08\xc9\xf2\xa7\xb6\xa5\x05********"));
}

}  // namespace
}  // namespace attend::client
