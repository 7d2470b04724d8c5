// SPDX-License-Identifier: Apache-2.0
//
// ModelInferRequest, as ModelInfer and ModelStreamInfer decode it. Any bytes give a request or a
// refusal, and the hand-written parser agrees with the generated class. An accepted request keeps
// every bound, has each tensor's bytes where its pointers lead, and takes no more memory than
// allowed for the message. Shared memory is covered by the region "r", a sparse file of zeros of
// the maximum size.

#include <fcntl.h>
#include <google/protobuf/stubs/logging.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "server/memory/host_pool.h"
#include "server/oip/infer_format.h"
#include "server/oip/infer_state.h"
#include "server/wire/tensor_copies.h"
#include "tests/fuzz/fuzz.h"
#include "tests/server/support/messages.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kPoolBytes = int64_t{16} << 20;
// Small fields take many times their encoded size when they are parsed (request_codec.h).
constexpr int64_t kParsedBytesMost = 64 * kHeaderBytesMax + (int64_t{1} << 16);

class HeapAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override {
    return std::aligned_alloc(4096, static_cast<size_t>((bytes + 4095) / 4096 * 4096));
  }
  void Free(void* data, int64_t) override { std::free(data); }
  Status Register(void*, int64_t) override { return Status(); }
  void Unregister(void*, int64_t) override {}
};

oip::RegionNames::Options FileRegions() {
  oip::RegionNames::Options options;
  options.files = SharedFile::Rules{"/attend-fuzz-", geteuid()};
  options.files_bytes_max = INT64_MAX;
  return options;
}

struct Server {
  Server() {
    const std::string key = "/attend-fuzz-" + std::to_string(getpid());
    const int file = shm_open(key.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    ATTEND_FUZZ_REQUIRE(file >= 0 && ftruncate(file, INT64_MAX) == 0, strerror(errno));
    close(file);
    const Status registered = regions.RegisterFile(0, "r", key, 0, INT64_MAX);
    ATTEND_FUZZ_REQUIRE(registered.ok(), registered.ToString());
    shm_unlink(key.c_str());
  }

  HeapAllocator allocator;
  std::unique_ptr<HostPool> pool = *HostPool::Make(allocator, kPoolBytes, {1});
  oip::RegionNames regions{FileRegions()};
  oip::ModelStatistics statistics;
  oip::InferFormat format{oip::InferFormat::Call::kUnary, regions, statistics};
};

// The same steps as in RequestReader.
Status Decode(Server& server, MessageSlices& slices, RequestMessage& message, Request& request) {
  google::protobuf::Arena arena;
  Validated validated;
  ATTEND_RETURN_IF_ERROR(server.format.Scan(message, request));
  ATTEND_RETURN_IF_ERROR(server.format.Parse(arena, slices, message, request));
  ATTEND_RETURN_IF_ERROR(Validate(*message.fields, message.arrays(), validated));
  ATTEND_RETURN_IF_ERROR(CheckSources(message, Transport::kInline, validated));
  ATTEND_RETURN_IF_ERROR(CheckRaw(message, validated));
  const Result<MemoryPlan> plan = PlanMemory(message, validated);
  ATTEND_RETURN_IF_ERROR(plan.status());
  ATTEND_RETURN_IF_ERROR(server.format.CheckPlaces(validated, request));
  Result<HostBlock> input = server.pool->Take(0, plan->input_bytes);
  ATTEND_RETURN_IF_ERROR(input.status());
  request.input = std::move(*input);
  PlaceArrays(message, validated, *plan, request);
  CopyTensors(message, validated, *plan, request);
  for (const FilePiece& file : TensorFiles(message, validated, *plan, request)) {
    ATTEND_RETURN_IF_ERROR(file.Copy());
  }
  return Status();
}

// The bytes of q are those that the generated class finds, or the file's zeros.
void RequirePlaced(const inference::ModelInferRequest& generated, const Request& request) {
  const auto* const placed = static_cast<const char*>(request.attention.q.data);
  if (placed == nullptr) return;
  int raws = 0;
  for (const auto& input : generated.inputs()) {
    const bool in_file = input.parameters().contains("shared_memory_region");
    if (input.name() == "q" && in_file) {
      const auto& size = input.parameters().at("shared_memory_byte_size");
      const bool zeros =
          std::all_of(placed, placed + size.int64_param(), [](char byte) { return byte == 0; });
      ATTEND_FUZZ_REQUIRE(zeros, "q of the file");
    } else if (input.name() == "q" && raws < generated.raw_input_contents_size()) {
      const std::string& raw = generated.raw_input_contents(raws);
      ATTEND_FUZZ_REQUIRE(raw.empty() || std::memcmp(raw.data(), placed, raw.size()) == 0, "q");
    }
    if (!in_file) ++raws;
  }
}

// The most bytes of numbers that Parse may have read from the file.
int64_t NumbersInFiles(const Request& request) {
  int64_t bytes = 0;
  for (int i = 0; request.protocol != nullptr && i < oip::kInputCount; ++i) {
    const oip::RegionPart& place = oip::InferState::Of(request)->inputs.at(i).place;
    if (place.region == nullptr || oip::IsTensor(static_cast<oip::Input>(i))) continue;
    bytes += std::min(place.bytes, kFieldBytesMax);
  }
  return std::min(bytes, kFieldBytesMax);
}

void RunOne(const std::string& bytes, std::mt19937_64& random) {
  static auto* const server = new Server();
  MessageSlices slices;
  slices.Take(Message(bytes, random));
  Request request;
  const MemoryPeak peak;
  RequestMessage message;
  message.slices = slices.spans();
  const Status status = Decode(*server, slices, message, request);
  const int64_t most =
      kParsedBytesMost + 4 * (static_cast<int64_t>(bytes.size()) + NumbersInFiles(request));
  ATTEND_FUZZ_REQUIRE(peak.bytes() <= most, std::to_string(peak.bytes()));
  inference::ModelInferRequest generated;
  const bool parsed = generated.ParseFromString(bytes);
  if (!status.ok()) {
    return RequireRefusal(status, {Code::kInvalidArgument, Code::kNotFound, Code::kUnimplemented,
                                   Code::kResourceExhausted});
  }
  ATTEND_FUZZ_REQUIRE(parsed, "the generated class refuses it");
  ATTEND_FUZZ_REQUIRE(oip::InferState::Of(request)->id == generated.id(), generated.id());
  RequirePlaced(generated, request);
  request.protocol->EndDecoding();
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const silence = new google::protobuf::LogSilencer();
  (void)silence;
  const std::string_view input = attend::fuzz::View(data, size);
  std::mt19937_64 random = attend::fuzz::RandomOf(input);
  for (const std::string& message : attend::fuzz::Records(input)) {
    attend::fuzz::RunOne(message, random);
    attend::fuzz::RunOne(attend::test::Shuffled(message, random), random);
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max,
                                          unsigned seed) {
  return attend::fuzz::MutateRecords(data, size, size_max, seed, [](size_t) {
    return std::make_unique<inference::ModelInferRequest>();
  });
}
