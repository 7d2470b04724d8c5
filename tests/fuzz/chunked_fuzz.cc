// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked, from the first message's header to the last chunk: each chunk's bytes go to its
// offset and nowhere else, no byte is accepted twice, and the request is complete if and only if
// all bytes have arrived.

#include <google/protobuf/stubs/logging.h>

#include <cstring>
#include <memory>
#include <vector>

#include "server/rpc/upload_places.h"
#include "server/wire/chunk_codec.h"
#include "server/wire/request_codec.h"
#include "server/wire/session_uses.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/two_sessions.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kChunkMax = 4096;
constexpr int64_t kTensorsBytesMax = int64_t{1} << 20;

// Memory of each tensor, of its exact size, and which of its bytes have arrived.
struct Upload {
  std::vector<std::vector<char>> memory;
  std::vector<std::vector<bool>> came;
  TensorPlaces places;
};

// Null if the header is refused or its tensors exceed kTensorsBytesMax.
std::unique_ptr<Upload> Begin(const RequestMessage& header) {
  static auto* const sessions = new TwoSessions();
  Request request;
  Validated validated;
  Status status = HoldSessions(*header.fields, &sessions->table(), request);
  const CacheHold* const cache = request.source.cache();
  if (status.ok()) status = Validate(*header.fields, header.arrays(), validated, cache);
  if (status.ok()) status = CheckSources(header, Transport::kChunked, validated);
  const Result<MemoryPlan> plan =
      status.ok() ? PlanMemory(header, validated, cache) : Result<MemoryPlan>(status);
  if (!plan.ok()) {
    RequireRefusal(plan.status(), {Code::kInvalidArgument, Code::kUnimplemented, Code::kNotFound,
                                   Code::kFailedPrecondition});
    return nullptr;
  }
  if (plan->input_bytes > kTensorsBytesMax) return nullptr;
  auto upload = std::make_unique<Upload>();
  upload->places.present = validated.present;
  upload->places.bytes = validated.tensor_bytes;
  for (int i = 0; i < kTensorsMax; ++i) {
    const auto bytes = static_cast<size_t>(validated.tensor_bytes[i]);
    upload->memory.emplace_back(bytes);
    upload->came.emplace_back(bytes);
  }
  for (int i = 0; i < kTensorsMax; ++i) upload->places.data[i] = upload->memory[i].data();
  return upload;
}

void RequireChunk(const std::string& bytes, const ChunkMessage& chunk, const Upload& upload) {
  v1::AttendChunkedRequest generated;
  ATTEND_FUZZ_REQUIRE(generated.ParseFromString(bytes), "accepted, but no message");
  ATTEND_FUZZ_REQUIRE(generated.tensor() == chunk.tensor() && generated.offset() == chunk.offset(),
                      generated.ShortDebugString());
  const int tensor = chunk.tensor() - v1::TENSOR_NAME_Q;
  ATTEND_FUZZ_REQUIRE(
      std::memcmp(generated.data().data(), upload.memory[tensor].data() + chunk.offset(),
                  generated.data().size()) == 0,
      generated.ShortDebugString());
}

// False if the chunk is refused, which ends the request.
bool TakeChunk(const std::string& bytes, std::mt19937_64& random, UploadPlaces& places,
               Upload& upload) {
  ChunkMessage chunk;
  Status status = chunk.Take(Message(bytes, random), kChunkMax + kChunkMarginBytes);
  if (status.ok()) status = chunk.ParseChunk(kChunkMax);
  const Result<char*> place = status.ok() ? places.Reserve(chunk) : Result<char*>(status);
  if (!place.ok()) {
    RequireRefusal(place.status(), {Code::kInvalidArgument});
    return false;
  }
  ATTEND_FUZZ_REQUIRE(chunk.bytes() >= 1 && chunk.bytes() <= kChunkMax, "bytes");
  const size_t tensor = static_cast<size_t>(chunk.tensor() - v1::TENSOR_NAME_Q);
  ATTEND_FUZZ_REQUIRE(tensor < upload.memory.size(), "tensor");
  const uint64_t size = upload.memory[tensor].size();
  ATTEND_FUZZ_REQUIRE(chunk.offset() <= size &&
                          static_cast<uint64_t>(chunk.bytes()) <= size - chunk.offset() &&
                          *place == upload.memory[tensor].data() + chunk.offset(),
                      "place");
  for (uint64_t i = chunk.offset(); i < chunk.offset() + static_cast<uint64_t>(chunk.bytes());
       ++i) {
    ATTEND_FUZZ_REQUIRE(!upload.came[tensor][i], "byte " + std::to_string(i) + " comes twice");
    upload.came[tensor][i] = true;
  }
  int64_t copied = 0;
  for (const HostPiece& piece : chunk.Pieces(*place)) {
    ATTEND_FUZZ_REQUIRE(static_cast<char*>(piece.to) == *place + copied, "pieces leave a gap");
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    copied += piece.bytes;
  }
  ATTEND_FUZZ_REQUIRE(copied == chunk.bytes(), std::to_string(copied));
  RequireChunk(bytes, chunk, upload);
  return true;
}

void RunOne(std::string_view input) {
  std::mt19937_64 random = RandomOf(input);
  const std::vector<std::string> messages = Records(input);
  if (messages.empty()) return;
  FirstMessage first;
  const Status status = first.Parse(Message(messages[0], random), kChunkBytesMax);
  if (!status.ok()) return RequireRefusal(status, {Code::kInvalidArgument});
  v1::AttendChunkedRequest generated;
  ATTEND_FUZZ_REQUIRE(
      generated.ParseFromString(messages[0]) && generated.has_token() == first.has_token(),
      "accepted, but no such message");
  if (first.has_token()) return;  // it opens a further stream of a request
  const std::unique_ptr<Upload> upload = Begin(first.header());
  if (upload == nullptr) return;
  UploadPlaces places(upload->places);
  for (size_t i = 1; i < messages.size(); ++i) {
    if (!TakeChunk(messages[i], random, places, *upload)) return;
  }
  bool complete = true;
  for (const std::vector<bool>& tensor : upload->came) {
    for (const bool byte : tensor) complete &= byte;
  }
  ATTEND_FUZZ_REQUIRE(places.MissingText().empty() == complete, places.MissingText());
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const silence = new google::protobuf::LogSilencer();
  (void)silence;
  attend::fuzz::RunOne(attend::fuzz::View(data, size));
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max,
                                          unsigned seed) {
  return attend::fuzz::MutateRecords(data, size, size_max, seed, [](size_t) {
    return std::make_unique<attend::v1::AttendChunkedRequest>();
  });
}
