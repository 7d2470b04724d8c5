// SPDX-License-Identifier: Apache-2.0
//
// Decodes ModelInferRequests as the request reader does, without a server. Files with keys of
// kInferKeyPrefix may be registered, of any size.

#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/oip/infer_format.h"
#include "server/oip/infer_state.h"
#include "server/wire/tensor_copies.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/infer_messages.h"
#include "tests/server/support/message_pieces.h"
#include "tests/server/support/messages.h"

namespace attend::test {

inline constexpr char kInferKeyPrefix[] = "/attend-infer-test-";

inline oip::RegionNames::Options InferFiles() {
  oip::RegionNames::Options options;
  options.files = SharedFile::Rules{kInferKeyPrefix, geteuid()};
  options.files_bytes_max = INT64_MAX;
  return options;
}

struct Decoded {
  Status status;
  Request request;
  MemoryPlan plan;
  Validated validated;
};

class InferRequestTest : public ::testing::Test {
 protected:
  // Decodes as the request reader does.
  void Decode(const MessageFormat& format, InMessage message, Decoded& out) {
    google::protobuf::Arena arena;
    MessageSlices slices;
    slices.Take(std::move(message));
    RequestMessage decoded;
    decoded.slices = slices.spans();
    out.status = Run(format, arena, slices, decoded, out);
    if (!out.status.ok()) return;
    out.request.input = Take(out.plan.input_bytes);
    out.request.output = Take(out.plan.output_bytes);
    PlaceArrays(decoded, out.validated, out.plan, out.request);
    CopyTensors(decoded, out.validated, out.plan, out.request);
    if (out.request.protocol != nullptr) out.request.protocol->EndDecoding();
  }

  static Status Run(const MessageFormat& format, google::protobuf::Arena& arena,
                    MessageSlices& slices, RequestMessage& decoded, Decoded& out) {
    ATTEND_RETURN_IF_ERROR(format.Scan(decoded, out.request));
    ATTEND_RETURN_IF_ERROR(format.Parse(arena, slices, decoded, out.request));
    ATTEND_RETURN_IF_ERROR(Validate(*decoded.fields, decoded.arrays(), out.validated));
    ATTEND_RETURN_IF_ERROR(CheckSources(decoded, Transport::kInline, out.validated));
    ATTEND_RETURN_IF_ERROR(CheckRaw(decoded, out.validated));
    const Result<MemoryPlan> plan = PlanMemory(decoded, out.validated);
    ATTEND_RETURN_IF_ERROR(plan.status());
    out.plan = *plan;
    return format.CheckPlaces(out.validated, out.request);
  }

  HostBlock Take(int64_t bytes) {
    Result<HostBlock> block = pool_->Take(0, bytes);
    if (bytes > 0) std::memset(block->data(), 0, static_cast<size_t>(bytes));
    return std::move(*block);
  }

  static InMessage Buffer(const std::string& bytes, std::mt19937_64& random) {
    return InPieces(bytes, random, 4096);
  }

  Status Refusal(const std::string& bytes) {
    std::mt19937_64 random(1);
    Decoded out;
    Decode(format_, Buffer(bytes, random), out);
    return out.status;
  }
  // Expects a refusal after a change of a valid request.
  void ExpectRefused(const std::function<void(inference::ModelInferRequest&)>& change, Code code,
                     const std::string& part,
                     const std::string& model = "attention_fp32_bhld_full") {
    inference::ModelInferRequest infer = PlainInfer(model);
    change(infer);
    const Status status = Refusal(infer.SerializeAsString());
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_THAT(status.message(), ::testing::HasSubstr(part));
  }

  FakeBackend backend_;
  std::unique_ptr<HostPool> pool_ =
      *HostPool::Make(backend_.host_allocator(), int64_t{1} << 28, {1});
  oip::RegionNames regions_{InferFiles()};
  oip::ModelStatistics statistics_;
  oip::InferFormat format_{oip::InferFormat::Call::kUnary, regions_, statistics_};
};

}  // namespace attend::test
