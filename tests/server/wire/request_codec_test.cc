// SPDX-License-Identifier: Apache-2.0

#include "server/wire/request_codec.h"
#include "server/wire/tensor_copies.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>

#include "tests/kernels/support/counted_new.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/messages.h"

namespace attend {
namespace {

using test::Pieces;

// A request decoded without a server, as the request reader does it.
struct Decoded {
  Status status;
  Request request;
  MemoryPlan plan;
  Validated validated;
};

class CodecTest : public ::testing::Test {
 protected:
  void Decode(const Pieces& pieces, bool as_pieces, Decoded& out) {
    google::protobuf::Arena arena;
    RequestMessage message;
    message.slices = pieces.spans();
    out.status = ScanMessage(message.slices, message.scan);
    if (out.status.ok()) out.status = ParseMessage(arena, message);
    if (out.status.ok()) {
      out.status = Validate(*message.fields, message.arrays(), out.validated);
    }
    if (out.status.ok()) out.status = CheckRaw(message, out.validated);
    if (!out.status.ok()) return;
    Result<MemoryPlan> plan = PlanMemory(message, out.validated);
    out.status = plan.status();
    if (!plan.ok()) return;
    out.plan = *plan;
    out.request.input = Take(plan->input_bytes);
    out.request.output = Take(plan->output_bytes);
    PlaceArrays(message, out.validated, *plan, out.request);
    WriteTreeBias(out.request);
    if (!as_pieces) {
      CopyTensors(message, out.validated, *plan, out.request);
      return;
    }
    for (const HostPiece& piece : TensorPieces(message, out.validated, *plan, out.request)) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    }
  }

  HostBlock Take(int64_t bytes) {
    Result<HostBlock> block = pool_->Take(0, bytes);
    if (bytes > 0) std::memset(block->data(), 0x5a, static_cast<size_t>(bytes));
    return std::move(*block);
  }

  test::FakeBackend backend_;
  std::unique_ptr<HostPool> pool_ =
      *HostPool::Make(backend_.host_allocator(), int64_t{1} << 30, {1});
};

// The bytes of tensor i, read through the decoded request's pointers.
std::string TensorBytes(const Decoded& decoded, int i) {
  const Attention& a = decoded.request.attention;
  const Gradients g = decoded.request.backward ? decoded.request.backward->gradients : Gradients();
  const void* const starts[] = {a.q.data, a.k.data, a.v.data,   a.bias.data,
                                a.o.data, a.lse,    g.d_o.data, g.d_lse};
  const auto bytes = static_cast<size_t>(decoded.validated.tensor_bytes[i]);
  return bytes == 0 ? "" : std::string(static_cast<const char*>(starts[i]), bytes);
}

// Whether both hide the same keys from each query.
bool SameBits(const Attention& a, const Attention& other) {
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t i = 0; i < s.q_len; ++i) {
      for (int64_t j = 0; j < s.k_len; ++j) {
        const auto bit = [&](const BiasView& bias) {
          return LoadElement(bias.data, DType::kBit, b * bias.stride_b + i * bias.stride_q + j);
        };
        if (bit(a.bias) != bit(other.bias)) return false;
      }
    }
  }
  return true;
}

void ExpectSameArrays(const v1::AttendRequest& sent, const Attention& a) {
  const auto equal = [](const auto& field, const auto* placed) {
    return field.empty()
               ? placed == nullptr
               : placed != nullptr &&
                     std::memcmp(field.data(), placed,
                                 static_cast<size_t>(field.size()) * sizeof(*placed)) == 0;
  };
  EXPECT_TRUE(equal(sent.q_lengths(), a.q_lengths));
  EXPECT_TRUE(equal(sent.kv_lengths(), a.kv_lengths));
  EXPECT_TRUE(equal(sent.cu_q(), a.q_offsets));
  EXPECT_TRUE(equal(sent.cu_kv(), a.kv_offsets));
  EXPECT_TRUE(equal(sent.alibi_slopes(), a.alibi_slopes));
  EXPECT_TRUE(equal(sent.sinks(), a.sinks));
}

TEST_F(CodecTest, DecodesAnyFragmentationAndFieldOrder) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const test::WireProblem problem = test::RandomWireProblem(seed + i, 2e4);
    const std::string bytes = problem.request.SerializeAsString();
    for (const bool shuffle : {false, true}) {
      const std::string sent = shuffle ? test::Shuffled(bytes, random) : bytes;
      Decoded decoded;
      Decode(Pieces(sent, random), (i & 1) != 0, decoded);
      ASSERT_TRUE(decoded.status.ok()) << decoded.status.ToString() << Describe(problem.spec);
      int raw = 0;
      for (int t = 0; t < kTensorsMax; ++t) {
        if (!decoded.validated.present[t]) continue;
        ASSERT_EQ(TensorBytes(decoded, t), problem.request.raw(raw++)) << "tensor " << t;
      }
      ASSERT_EQ(raw, problem.request.raw_size());
      ExpectSameArrays(problem.request, decoded.request.attention);
      if (!problem.request.tree().empty()) {
        EXPECT_TRUE(SameBits(decoded.request.attention, problem.owned.attention));
      }
      EXPECT_EQ(Describe(decoded.request.attention.problem),
                Describe(problem.owned.attention.problem));
    }
  }
}

TEST_F(CodecTest, PartsAreAlignedAndDoNotOverlap) {
  test::WireProblem problem = test::PlainWireProblem(1, 7, 5);
  problem.request.add_q_lengths(3);
  problem.request.add_sinks(1);
  problem.request.add_sinks(2);
  Decoded decoded;
  Decode(Pieces(problem.request.SerializeAsString()), false, decoded);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status.ToString();
  const Attention& a = decoded.request.attention;
  for (const void* part : {a.q.data, a.k.data, a.v.data, static_cast<const void*>(a.q_lengths),
                           static_cast<const void*>(a.sinks), static_cast<const void*>(a.o.data),
                           static_cast<const void*>(a.lse)}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(part) % kTensorAlignBytes, 0u);
  }
  EXPECT_EQ(decoded.plan.tensors[1], 512);  // 2 * 7 * 5 * 4 = 280 bytes of q
}

// The generated class decides whether the bytes are a message at all.
TEST_F(CodecTest, AgreesWithTheGeneratedParserOnEveryTruncation) {
  std::mt19937_64 random(test::FreshSeed());
  test::WireProblem problem = test::PlainWireProblem(2, 2, 3);
  problem.request.add_q_lengths(2);
  problem.request.mutable_mask()->set_window_left(-1);
  const std::string bytes = problem.request.SerializeAsString();
  for (size_t length = 0; length < bytes.size(); ++length) {
    const std::string cut = bytes.substr(0, length);
    Decoded decoded;
    Decode(Pieces(cut, random), false, decoded);
    EXPECT_EQ(decoded.status.code(), Code::kInvalidArgument) << "cut at " << length;
    EXPECT_FALSE(decoded.status.message().empty());
    const bool is_message = v1::AttendRequest().ParseFromString(cut);
    const bool malformed =
        decoded.status.message().find("not an AttendRequest") != std::string::npos;
    EXPECT_EQ(malformed, !is_message) << "cut at " << length << ": " << decoded.status.ToString();
  }
}

// The bytes of a field, `count` times.
std::string Times(int64_t count, std::string_view field) {
  std::string all;
  all.reserve(static_cast<size_t>(count) * field.size());
  for (int64_t i = 0; i < count; ++i) all += field;
  return all;
}

std::string Packed(int number, const std::string& entries) {
  google::protobuf::UnknownFieldSet field;
  field.AddLengthDelimited(number, entries);
  std::string bytes;
  field.SerializeToString(&bytes);
  return bytes;
}

// For any fields in any order: parsed by the generated class, each of these takes 8 to 60 times its
// bytes.
TEST_F(CodecTest, AMessageTakesLittleMemoryBesideItsBytes) {
  constexpr int64_t kCount = int64_t{1} << 19;
  constexpr int64_t kHeapBytesMax = int64_t{64} << 10;
  google::protobuf::LogSilencer silence;
  v1::AttendRequest packed = test::PlainWireProblem(5).request;
  packed.clear_raw();
  for (v1::Tensor* tensor : {packed.mutable_q(), packed.mutable_k(), packed.mutable_v()}) {
    tensor->clear_shape();
    for (const int64_t dim : {0, 2, 4}) tensor->add_shape(dim);
  }
  packed.set_layout(v1::LAYOUT_LHD);
  const std::string fields = packed.SerializeAsString();
  const std::string zeros(kCount, '\0');
  const std::string raws = Times(3, std::string_view("\xc2\x3e\0", 3));
  const std::string odd = std::string("\xf8\x7d\x01", 3);  // an unknown field
  struct Case {
    const char* what;
    std::string bytes;
    bool good;
  };
  const std::vector<Case> cases = {
      {"numbers", Packed(9, zeros) + Packed(10, zeros) + fields + raws, true},
      {"numbers behind", fields + raws + Packed(9, zeros) + Packed(10, zeros), true},
      {"numbers one by one", fields + Times(kCount, std::string_view("\x48\0\x50\0", 4)) + raws,
       true},
      {"floats", fields + Packed(14, zeros), false},
      {"raw", fields + Times(kCount, std::string_view("\xc2\x3e\0", 3)), false},
      {"raw before an odd field", Times(kCount, std::string_view("\xc2\x3e\0", 3)) + odd, false},
      {"a shape", Packed(2, Packed(2, std::string(kCount, '\x01'))) + raws, false},
      {"unknown fields", fields + Times(kCount, odd) + raws, false},
      {"unknown strings", Times(kCount, std::string_view("\xfa\x7d\0", 3)) + fields, false},
      {"unknown in a tensor", Packed(2, Times(kCount, std::string_view("\x7a\0", 2))), false},
      {"groups", Times(kCount, std::string_view("\x7b\x7c", 2)) + fields, false},
      {"groups in a tensor", Packed(2, Times(500, std::string_view("\x7b\x7c", 2))), false},
      {"sessions", fields + Times(6000, std::string_view("\xb2\x01\0", 3)) + raws, false},
      {"a name", Packed(17, std::string(kCount, 'k')) + fields + raws, false},
  };
  for (const Case& each : cases) {
    const Pieces pieces(each.bytes);
    Decoded decoded;
    const test::HeapWatch watch;
    Decode(pieces, false, decoded);
    EXPECT_LE(watch.peak_bytes(), kHeapBytesMax) << each.what;
    ASSERT_EQ(decoded.status.ok(), each.good) << each.what << ": " << decoded.status.ToString();
    if (each.good) {
      EXPECT_EQ(decoded.request.attention.problem.batch, kCount - 1) << each.what;
      EXPECT_EQ(decoded.request.attention.q_offsets[kCount - 1], 0) << each.what;
    } else {
      EXPECT_EQ(decoded.status.code(), Code::kInvalidArgument) << each.what;
    }
  }
}

TEST_F(CodecTest, FieldsBesidesTheTensorsAreBounded) {
  const std::string fields = test::PlainWireProblem(5).request.SerializeAsString();
  const auto message_of = [&](const std::string& bytes) {
    Decoded decoded;
    Decode(Pieces(bytes), false, decoded);
    return decoded.status.message();
  };
  EXPECT_EQ(message_of(fields + Packed(5000, std::string(3500, 'u'))), "");
  EXPECT_THAT(message_of(Packed(5000, std::string(20480, 'u')) + fields),
              ::testing::EndsWith("have at least 20486 bytes, must have at most 20480"));
  EXPECT_EQ(message_of(fields + Packed(9, std::string(size_t{5} << 20, '\0'))),
            "the message has more than 4194304 bytes outside its raw entries");
}

TEST_F(CodecTest, SessionsAreCountedBeforeTheyAreParsed) {
  const std::string fields = test::PlainWireProblem(5).request.SerializeAsString();
  const auto scan = [&](int64_t sessions, const std::string& rest) {
    const Pieces pieces(Times(sessions, std::string_view("\xb2\x01\0", 3)) + rest);
    MessageScan found;
    return ScanMessage(pieces.spans(), found).ToString();
  };
  EXPECT_EQ(scan(256, fields), "OK");
  EXPECT_EQ(scan(257, fields), "INVALID_ARGUMENT: sessions has 257 entries, must have at most 256");
  EXPECT_THAT(scan(6000, Packed(22, "") + Packed(22, "")),
              ::testing::HasSubstr("sessions has 6002 entries"));
}

TEST_F(CodecTest, DeclaredLengthsAreCheckedBeforeAllocating) {
  // 4 GiB declared in a raw entry, 4 bytes sent.
  std::string bytes = test::PlainWireProblem(3).request.SerializeAsString();
  v1::AttendRequest header;
  header.ParseFromString(bytes);
  header.clear_raw();
  std::string lying = header.SerializeAsString();
  lying += std::string("\xc2\x3e\x80\x80\x80\x80\x10", 7) + "abcd";
  Decoded decoded;
  Decode(Pieces(lying), false, decoded);
  EXPECT_EQ(decoded.status.code(), Code::kInvalidArgument);
  EXPECT_NE(decoded.status.message().find("declares 4294967296 bytes, 4 are left"),
            std::string::npos)
      << decoded.status.message();
  EXPECT_EQ(pool_->used_bytes(), 0);
}

TEST_F(CodecTest, RawMustMatchTheTensors) {
  test::WireProblem problem = test::PlainWireProblem(4);
  const auto message_of = [&](const v1::AttendRequest& request) {
    Decoded decoded;
    Decode(Pieces(request.SerializeAsString()), false, decoded);
    EXPECT_EQ(decoded.status.code(), Code::kInvalidArgument);
    return decoded.status.message();
  };
  v1::AttendRequest two = problem.request;
  two.mutable_raw()->RemoveLast();
  EXPECT_EQ(message_of(two), "raw has 2 entries, must have 3, one for each of q, k, v");
  v1::AttendRequest many = problem.request;
  for (int i = 0; i < 1000; ++i) many.add_raw();
  EXPECT_EQ(message_of(many), "raw has 1003 entries, must have 3, one for each of q, k, v");
  v1::AttendRequest shorter = problem.request;
  shorter.mutable_raw(1)->pop_back();
  EXPECT_EQ(message_of(shorter), "raw[1] has 1023 bytes, must have 1024, the bytes of k");
}

TEST(SliceReaderTest, ReadsAcrossAnyPieces) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::string bytes(5000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  for (int round = 0; round < 200; ++round) {
    const Pieces pieces(bytes, random);
    SliceReader reader(pieces.spans());
    size_t at = 0;
    while (at < bytes.size()) {
      ASSERT_EQ(reader.position(), static_cast<int64_t>(at));
      const size_t step = std::min<size_t>(random() % 300, bytes.size() - at);
      if (random() % 4 == 0) {
        ASSERT_TRUE(reader.Skip(static_cast<int64_t>(step)));
      } else {
        std::string read(step, '\0');
        reader.Read(read.data(), static_cast<int64_t>(step));
        ASSERT_EQ(read, bytes.substr(at, step));
      }
      at += step;
    }
    EXPECT_EQ(reader.remaining(), 0);
    EXPECT_FALSE(reader.Skip(1));
  }
}

TEST(SliceReaderTest, ReadsVarints) {
  const auto read = [](std::string_view bytes) -> std::optional<uint64_t> {
    const Pieces pieces(bytes);
    SliceReader reader(pieces.spans());
    uint64_t value = 0;
    return reader.ReadVarint(&value) ? std::optional(value) : std::nullopt;
  };
  EXPECT_EQ(read(std::string(1, '\0')), 0u);
  EXPECT_EQ(read("\x7f"), 127u);
  EXPECT_EQ(read("\x80\x01"), 128u);
  EXPECT_EQ(read("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), UINT64_MAX);
  EXPECT_EQ(read(""), std::nullopt);
  EXPECT_EQ(read("\x80"), std::nullopt);
  EXPECT_EQ(read("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), std::nullopt);
}

}  // namespace
}  // namespace attend
