// SPDX-License-Identifier: Apache-2.0
//
// A server's answers, as the client library reads them: an AttendResponse by itself, the messages
// of an AttendChunked answer, and the retry pushback in the metadata. An accepted answer has the
// bytes that the generated class finds in it. Only the answer's own memory is written, and it is
// no larger than the message or the answer that the call expects.

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "client/call/retry_policy.h"
#include "client/wire/chunk_codec.h"
#include "client/wire/message_codec.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

using client::Payload;

// B1 H2 L4 D8 of fp16, with LSE: O has 128 bytes, the LSE 32.
std::shared_ptr<const client::ChunkedCall> TheCall() {
  static const std::vector<char> zeros(128);
  client::AttentionCall call;
  for (client::TensorRef* tensor : {&call.q, &call.k, &call.v}) {
    *tensor = client::TensorRef(DType::kFloat16, {1, 2, 4, 8}, zeros.data(), 128);
  }
  call.return_lse = true;
  Result<client::ChunkedCall> made = client::ChunkedCall::Make(call, nullptr);
  ATTEND_FUZZ_REQUIRE(made.ok(), made.status().ToString());
  return std::make_shared<client::ChunkedCall>(std::move(*made));
}

void RequireTensor(const client::HostTensor& tensor, const std::string& came, Payload payload) {
  const Result<int64_t> bytes = client::TensorBytes("tensor", tensor.dtype, tensor.shape);
  ATTEND_FUZZ_REQUIRE(bytes.ok() && *bytes == tensor.bytes, client::ShapeText(tensor.shape));
  ATTEND_FUZZ_REQUIRE(tensor.bytes == static_cast<int64_t>(came.size()),
                      std::to_string(came.size()));
  if (payload == Payload::kDiscard || came.empty()) return;
  ATTEND_FUZZ_REQUIRE(std::memcmp(tensor.data.get(), came.data(), came.size()) == 0, "the bytes");
}

// In the order of TensorName in the protocol.
std::vector<const client::HostTensor*> TensorsOf(const client::AttentionResult& result) {
  std::vector<const client::HostTensor*> tensors;
  if (!result.gradients) tensors.push_back(&result.o);
  if (result.lse) tensors.push_back(&*result.lse);
  if (!result.gradients) return tensors;
  const client::GradientTensors& g = *result.gradients;
  for (const std::optional<client::HostTensor>* each :
       {&g.d_q, &g.d_k, &g.d_v, &g.d_bias, &g.d_sinks}) {
    if (*each) tensors.push_back(&**each);
  }
  return tensors;
}

void DecodeOne(const std::string& bytes, Payload payload, std::mt19937_64& random) {
  grpc::ByteBuffer buffer = Buffer(bytes, random);
  const MemoryPeak peak;
  const Result<client::DecodedResponse> decoded = client::DecodeResponse(&buffer, payload);
  // While they are parsed, fields other than tensors exist twice.
  const int64_t bound = 64 * static_cast<int64_t>(bytes.size()) + (int64_t{64} << 10);
  ATTEND_FUZZ_REQUIRE(peak.bytes() <= bound,
                      std::to_string(peak.bytes()) + " bytes for " + std::to_string(bytes.size()));
  if (!decoded.ok()) return RequireRefusal(decoded.status(), {Code::kInternal});
  v1::AttendResponse generated;
  ATTEND_FUZZ_REQUIRE(generated.ParseFromString(bytes), "accepted, but no message");
  if (decoded->has_status) {
    ATTEND_FUZZ_REQUIRE(!decoded->status.ok(), "a failure with code OK");
    return;
  }
  const std::vector<const client::HostTensor*> tensors = TensorsOf(decoded->result);
  ATTEND_FUZZ_REQUIRE(generated.raw_size() == static_cast<int>(tensors.size()), "raw");
  for (size_t n = 0; n < tensors.size(); ++n) {
    RequireTensor(*tensors[n], generated.raw(static_cast<int>(n)), payload);
  }
}

void DecodeChunked(const std::vector<std::string>& messages, Payload payload,
                   std::mt19937_64& random) {
  static const auto* const call = new std::shared_ptr<const client::ChunkedCall>(TheCall());
  client::ChunkedAnswer answer(*call, payload);
  for (const std::string& bytes : messages) {
    grpc::ByteBuffer buffer = Buffer(bytes, random);
    std::optional<v1::ChunkedGrant> grant;
    const Status status = answer.Take(&buffer, &grant);
    // The first bad message ends a call.
    if (!status.ok()) return RequireRefusal(status, {Code::kInternal});
    if (!answer.complete()) continue;
    const client::DecodedResponse taken = answer.TakeResponse();
    ATTEND_FUZZ_REQUIRE(taken.payload_bytes == 160 && taken.result.lse, "the sizes");
    return;
  }
}

void ReadPushback(std::string_view text) {
  const client::Pushback pushback = client::ParsePushback(text);
  ATTEND_FUZZ_REQUIRE(pushback.kind != client::Pushback::Kind::kNone, std::string(text));
  ATTEND_FUZZ_REQUIRE(pushback.wait.count() >= 0 && pushback.wait <= std::chrono::hours(24),
                      std::string(text));
  client::RetryState retry(client::RetryPolicy(), 1);
  const auto wait = retry.AfterFailure(Code::kUnavailable, pushback, std::nullopt);
  ATTEND_FUZZ_REQUIRE(!wait || *wait >= pushback.wait, std::string(text));
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attend::fuzz;
  static const auto* const silence = new google::protobuf::LogSilencer();
  (void)silence;
  const std::string_view input = View(data, size);
  std::mt19937_64 random = RandomOf(input);
  const std::vector<std::string> messages = Records(input);
  for (const Payload payload : {Payload::kCopy, Payload::kDiscard}) {
    for (const std::string& message : messages) DecodeOne(message, payload, random);
    DecodeChunked(messages, payload, random);
  }
  for (const std::string& message : messages) ReadPushback(message);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max,
                                          unsigned seed) {
  // A single record is mutated as an AttendResponse, several as a chunked answer.
  const bool alone = attend::fuzz::Records(attend::fuzz::View(data, size)).size() <= 1;
  return attend::fuzz::MutateRecords(data, size, size_max, seed,
                                     [alone](size_t) -> std::unique_ptr<google::protobuf::Message> {
                                       if (alone)
                                         return std::make_unique<attend::v1::AttendResponse>();
                                       return std::make_unique<attend::v1::AttendChunkedResponse>();
                                     });
}
