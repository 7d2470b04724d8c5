// SPDX-License-Identifier: Apache-2.0
//
// AttendRequest, as Attend and AttendStream decode it: from the pieces that it arrives in to its
// place in the request's memory. The hand-written parser agrees with the generated class. An
// accepted request keeps every bound, has each byte where its pointers lead, describes the same
// problem to the client and in a dump, and takes no more memory than allowed for the message.

#include <google/protobuf/stubs/logging.h>

#include <cstring>
#include <memory>

#include "client/wire/message_codec.h"
#include "kernels/cpu/append_keys.h"
#include "server/app/dump.h"
#include "server/memory/host_pool.h"
#include "server/regions/region_registry.h"
#include "server/wire/request_codec.h"
#include "server/wire/session_uses.h"
#include "server/wire/shared_tensors.h"
#include "server/wire/tensor_copies.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/two_sessions.h"
#include "tests/server/support/messages.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kPoolBytes = int64_t{16} << 20;
constexpr int64_t kRegionBytes = int64_t{1} << 16;

class HeapAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override {
    return std::aligned_alloc(4096, static_cast<size_t>((bytes + 4095) / 4096 * 4096));
  }
  void Free(void* data, int64_t) override { std::free(data); }
  Status Register(void*, int64_t) override { return Status(); }
  void Unregister(void*, int64_t) override {}
};

class HeapMemory final : public RegionMemory {
 public:
  explicit HeapMemory(HeapAllocator& allocator) : allocator_(allocator) {}
  Result<RegionMapping> Map(int64_t bytes) override {
    RegionMapping mapping;
    mapping.bytes = bytes;
    mapping.data = *allocator_.Allocate(bytes);
    return mapping;
  }
  void Unlock(void*, int64_t) override {}
  void Unmap(void* data, int64_t bytes, Pages) override { allocator_.Free(data, bytes); }
  int64_t page_bytes() const override { return 4096; }

 private:
  HeapAllocator& allocator_;
};

// Shared by all inputs: a pool, two regions that messages can name, "region-aaaaaaaaa" and
// "region-bbbbbbbbb", and two sessions.
struct Server {
  Server() {
    const uint64_t client = registry.AddClient(SharedRegion::kAnyTenant);
    for (int i = 0; i < 2; ++i) {
      const auto created = registry.Create(client, kRegionBytes);
      ATTEND_FUZZ_REQUIRE(created.ok(), created.status().ToString());
    }
  }
  HeapAllocator allocator;
  std::unique_ptr<HostPool> pool = *HostPool::Make(allocator, kPoolBytes, {1});
  HeapMemory memory{allocator};
  char next = 'a';
  const SteadyClock clock;
  TwoSessions sessions;
  RegionRegistry registry{
      RegionLimits{.tenant_weights = {1}}, memory, clock,
      [this]() -> Result<std::string> { return "region-" + std::string(kTokenBytes - 7, next++); }};
};

struct Decoded {
  google::protobuf::Arena arena;
  RequestMessage message;
  Validated validated;
  MemoryPlan plan;
  Request request;
};

// The same steps as in RequestReader.
Status Decode(std::span<const ByteSpan> slices, bool as_pieces, Server& server, Decoded& out) {
  RequestMessage& message = out.message;
  message.slices = slices;
  ATTEND_RETURN_IF_ERROR(ScanMessage(slices, message.scan));
  ATTEND_RETURN_IF_ERROR(ParseMessage(out.arena, message));
  ATTEND_RETURN_IF_ERROR(HoldSessions(*message.fields, &server.sessions.table(), out.request));
  const CacheHold* const cache = out.request.source.cache();
  ATTEND_RETURN_IF_ERROR(Validate(*message.fields, message.arrays(), out.validated, cache));
  ATTEND_RETURN_IF_ERROR(CheckSources(message, Transport::kInline, out.validated));
  ATTEND_RETURN_IF_ERROR(CheckRaw(message, out.validated));
  const Result<MemoryPlan> plan = PlanMemory(message, out.validated, cache);
  ATTEND_RETURN_IF_ERROR(plan.status());
  out.plan = *plan;
  ATTEND_RETURN_IF_ERROR(
      FindSharedTensors(*message.fields, out.validated, &server.registry, out.request));
  Result<HostBlock> input = server.pool->Take(0, plan->input_bytes);
  ATTEND_RETURN_IF_ERROR(input.status());
  Result<HostBlock> output = server.pool->Take(0, plan->output_bytes);
  ATTEND_RETURN_IF_ERROR(output.status());
  out.request.input = std::move(*input);
  out.request.output = std::move(*output);
  ATTEND_RETURN_IF_ERROR(ReservePages(out.plan, out.request));
  PlaceArrays(message, out.validated, out.plan, out.request);
  WriteTreeBias(out.request);
  if (!as_pieces) {
    CopyTensors(message, out.validated, out.plan, out.request);
    return Status();
  }
  for (const HostPiece& piece : TensorPieces(message, out.validated, out.plan, out.request)) {
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  }
  return Status();
}

// Only parses and validates.
Status Judge(const v1::AttendRequest& request, Validated& validated) {
  const test::Pieces pieces(request.SerializePartialAsString());
  google::protobuf::Arena arena;
  RequestMessage message;
  message.slices = pieces.spans();
  ATTEND_RETURN_IF_ERROR(ScanMessage(message.slices, message.scan));
  ATTEND_RETURN_IF_ERROR(ParseMessage(arena, message));
  ATTEND_RETURN_IF_ERROR(Validate(*message.fields, message.arrays(), validated));
  return CheckSources(message, Transport::kInline, validated);
}

template <class Field, class T>
void RequireArray(const Field& sent, const T* placed, const char* name) {
  const size_t bytes = static_cast<size_t>(sent.size()) * sizeof(T);
  const bool same = sent.empty()
                        ? placed == nullptr
                        : placed != nullptr && std::memcmp(sent.data(), placed, bytes) == 0;
  ATTEND_FUZZ_REQUIRE(same, name);
}

// Appends new rows to the sessions' pages, so that AddressSanitizer finds wrong addresses.
void RequireAppended(Decoded& decoded) {
  const CacheHold* const cache = decoded.request.source.cache();
  WorkItem item;
  decoded.request.source.ApplyTo(item);
  const Attention& a = decoded.request.attention;
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const CacheHold::Sequence& sequence = cache->sequences()[b];
    ATTEND_FUZZ_REQUIRE(a.kv_lengths[b] == sequence.length && sequence.length <= a.problem.len_k,
                        "length");
    const int64_t rows = a.problem.page_rows;
    ATTEND_FUZZ_REQUIRE(std::ssize(sequence.pages) == (sequence.length + rows - 1) / rows, "pages");
  }
  if (item.append.rows > 0) AppendKeys(a, item.append);
}

// Requires every byte where the request's pointers lead.
void RequirePlaced(const v1::AttendRequest& sent, const Decoded& decoded) {
  const Attention& a = decoded.request.attention;
  RequireArray(sent.q_lengths(), a.q_lengths, "q_lengths");
  if (sent.sessions_size() == 0) RequireArray(sent.kv_lengths(), a.kv_lengths, "kv_lengths");
  RequireArray(sent.cu_q(), a.q_offsets, "cu_q");
  RequireArray(sent.cu_kv(), a.kv_offsets, "cu_kv");
  RequireArray(sent.alibi_slopes(), a.alibi_slopes, "alibi_slopes");
  RequireArray(sent.sinks(), a.sinks, "sinks");
  const bool has_tree = decoded.validated.tree.tokens > 0;
  ATTEND_FUZZ_REQUIRE(has_tree == !sent.tree().empty(), "tree");
  if (has_tree) {
    const char* const bits = static_cast<const char*>(decoded.request.input.data()) +
                             decoded.plan.arrays[static_cast<size_t>(ArrayField::kTree)];
    ATTEND_FUZZ_REQUIRE(sent.tree() == std::string_view(bits, sent.tree().size()), "tree's bits");
  }
  const std::optional<BackwardPass>& backward = decoded.request.backward;
  const void* tensors[kTensorsMax] = {a.q.data, a.k.data, a.v.data, a.bias.data};
  if (backward) {
    tensors[kInputO] = a.o.data;
    tensors[kInputLse] = a.lse;
    tensors[kInputDO] = backward->gradients.d_o.data;
    tensors[kInputDLse] = backward->gradients.d_lse;
  }
  for (int i = 0, raw = 0; i < kTensorsMax; ++i) {
    if (!decoded.validated.present[i]) continue;
    const auto bytes = static_cast<size_t>(decoded.validated.tensor_bytes[i]);
    if (sent.sessions_size() > 0 && (i == 1 || i == 2)) {  // they are in pages
      raw += decoded.validated.in_message(i) ? 1 : 0;
      continue;
    }
    if (decoded.validated.shared[i]) {
      const RegionPlace& place = decoded.request.source.shared()->inputs[i];
      ATTEND_FUZZ_REQUIRE(place.data() == tensors[i] && place.offset >= 0 &&
                              place.offset + place.bytes <= place.region->bytes,
                          "shared tensor " + std::to_string(i));
      continue;
    }
    const std::string& came = sent.raw(raw++);
    ATTEND_FUZZ_REQUIRE(
        came.size() == bytes && (bytes == 0 || std::memcmp(came.data(), tensors[i], bytes) == 0),
        "tensor " + std::to_string(i));
  }
  // Writes the outputs, so that AddressSanitizer finds wrong addresses.
  for (const OutputTensor& each : OutputsOf(decoded.request)) {
    if (each.data == nullptr) continue;
    std::memset(const_cast<void*>(each.data), 1, static_cast<size_t>(each.bytes));
  }
}

// Requires that the request's dump describes the same problem, to the server and to the client.
void RequireSameMeaning(const v1::AttendRequest& sent, const Decoded& decoded) {
  Problem problem = decoded.request.attention.problem;
  problem.page_rows = 0;  // a dump holds the rows of a session's pages, one after another
  const std::string meaning = Describe(problem);
  v1::AttendRequest again;
  FillRequest(decoded.request, &again);
  Validated validated;
  const Status status = Judge(again, validated);
  // With a batch of 0, arrays with an entry per sequence are empty, which means unset.
  if (problem.batch == 0) return;
  ATTEND_FUZZ_REQUIRE(status.ok(), status.ToString());
  ATTEND_FUZZ_REQUIRE(Describe(validated.attention.problem) == meaning,
                      Describe(validated.attention.problem) + "\n" + meaning);
  if (decoded.validated.any_shared() || sent.sessions_size() > 0) return;
  const auto call = client::CallFromRequest(std::make_shared<v1::AttendRequest>(sent));
  ATTEND_FUZZ_REQUIRE(call.ok(), call.status().ToString());
  Result<Attention> described = client::Describe(*call, nullptr, nullptr);
  ATTEND_FUZZ_REQUIRE(described.ok(), described.status().ToString() + "\n" + meaning);
  described->problem.return_lse = problem.return_lse;  // Describe() does not set it
  ATTEND_FUZZ_REQUIRE(Describe(described->problem) == meaning,
                      Describe(described->problem) + "\n" + meaning);
}

void RunOne(const std::string& bytes, std::mt19937_64& random) {
  static auto* const server = new Server();
  static const auto* const made_once = v1::Placement::GetReflection();
  (void)made_once;
  v1::AttendRequest generated;
  const bool is_message = generated.ParseFromString(bytes);
  const test::Pieces pieces(bytes, random);
  const bool as_pieces = (random() & 1) != 0;
  const MemoryPeak peak;
  Decoded decoded;
  const Status status = Decode(pieces.spans(), as_pieces, *server, decoded);
  // Includes the message and the block that its tensors were copied to.
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t held = peak.bytes() + size + HostPool::BlockBytes(decoded.request.input.bytes());
  // A tree is expanded to a bias, within the budget.
  ATTEND_FUZZ_REQUIRE(held <= 2 * size + decoded.validated.tree_bytes + (int64_t{64} << 10),
                      std::to_string(held) + " bytes for a message of " + std::to_string(size));
  if (!status.ok()) {
    RequireRefusal(status, {Code::kInvalidArgument, Code::kUnimplemented, Code::kNotFound,
                            Code::kResourceExhausted, Code::kFailedPrecondition});
    return;
  }
  ATTEND_FUZZ_REQUIRE(is_message, "accepted, but the generated class does not parse it");
  const Problem& problem = decoded.request.attention.problem;
  const Status checked = Check(problem);
  ATTEND_FUZZ_REQUIRE(checked.ok(), checked.ToString());
  if (decoded.request.source.cache() != nullptr) RequireAppended(decoded);
  RequirePlaced(generated, decoded);
  RequireSameMeaning(generated, decoded);
}

// Gives each inline tensor the bytes of its shape, unless they are many.
void FitRaw(google::protobuf::Message& message, std::mt19937_64& random) {
  auto& request = static_cast<v1::AttendRequest&>(message);
  int raw = 0;
  const v1::BackwardPass& backward = request.backward();
  for (const v1::Tensor* tensor :
       {&request.q(), &request.k(), &request.v(), &request.bias(), &backward.o(), &backward.lse(),
        &backward.d_o(), &backward.d_lse()}) {
    if (tensor->source_case() == v1::Tensor::kSharedMemory) continue;
    if (tensor == &request.bias() && !request.has_bias()) continue;
    if (tensor == &backward.d_lse() && !backward.has_d_lse()) continue;
    if (!request.has_backward() &&
        (tensor == &backward.o() || tensor == &backward.lse() || tensor == &backward.d_o())) {
      continue;
    }
    if (request.sessions_size() > 0 && tensor == &request.k() && !request.has_k()) continue;
    if (request.sessions_size() > 0 && tensor == &request.v() && !request.has_v()) continue;
    int64_t bytes = tensor->dtype() == v1::DTYPE_FLOAT32 ? 4 : 2;
    for (const int64_t dim : tensor->shape()) {
      if (dim < 0 || dim > 4096 || bytes * dim > 4096) return;
      bytes *= dim;
    }
    if (request.raw_size() == raw) request.add_raw();
    request.mutable_raw(raw++)->resize(static_cast<size_t>(bytes), static_cast<char>(random()));
  }
  while (request.raw_size() > raw) request.mutable_raw()->RemoveLast();
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
  return attend::fuzz::MutateRecords(
      data, size, size_max, seed,
      [](size_t) { return std::make_unique<attend::v1::AttendRequest>(); }, attend::fuzz::FitRaw);
}
