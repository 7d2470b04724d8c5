// SPDX-License-Identifier: Apache-2.0

#include "tests/fuzz/fuzz.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>
#include <sanitizer/allocator_interface.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

#include "tests/server/support/message_pieces.h"

namespace attend::fuzz {
namespace {

namespace pb = google::protobuf;

std::atomic<int64_t> heap_bytes{0};
std::atomic<int64_t> heap_peak{0};

void OnMalloc(const volatile void*, size_t bytes) {
  const int64_t now =
      heap_bytes.fetch_add(static_cast<int64_t>(bytes)) + static_cast<int64_t>(bytes);
  int64_t peak = heap_peak.load();
  while (now > peak && !heap_peak.compare_exchange_weak(peak, now)) {
  }
}

void OnFree(const volatile void* data) {
  heap_bytes.fetch_sub(
      static_cast<int64_t>(__sanitizer_get_allocated_size(const_cast<const void*>(data))));
}

int64_t RandomInt(std::mt19937_64& random, int64_t old) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kEnds[] = {0,         1,          2,    -1,      16,      64,
                               255,       256,        4096, 1 << 16, 1 << 20, INT32_MAX,
                               INT32_MIN, UINT32_MAX, kMax, ~kMax};
  switch (random() % 4) {
    case 0:
      return kEnds[random() % std::size(kEnds)];
    case 1:
      return static_cast<int64_t>(static_cast<uint64_t>(old) + random() % 5 - 2);
    case 2:
      return static_cast<int64_t>(random() % 20);
    default:
      return static_cast<int64_t>(random() >> (random() % 64));
  }
}

double RandomDouble(std::mt19937_64& random) {
  constexpr double kEnds[] = {0.0,
                              -0.0,
                              1.0,
                              -1.0,
                              1e-40,
                              3e38,
                              std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()};
  return kEnds[random() % std::size(kEnds)];
}

std::string MutateBytes(std::string bytes, std::mt19937_64& random) {
  const size_t size_max = bytes.size() + 1 + random() % 64;
  const size_t size = bytes.size();
  bytes.resize(size_max);
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), size, size_max));
  return bytes;
}

// Keeps strings ASCII, as Protobuf logs an error when it serialises invalid UTF-8.
std::string MutateText(const pb::FieldDescriptor& field, const std::string& text,
                       std::mt19937_64& random) {
  std::string changed = MutateBytes(text, random);
  if (field.type() == pb::FieldDescriptor::TYPE_STRING) {
    for (char& c : changed) c = static_cast<char>(c & 0x7f);
  }
  return changed;
}

// Sets one entry of a repeated field, or the field itself (index -1).
void MutateField(pb::Message& message, const pb::FieldDescriptor& field, int index,
                 std::mt19937_64& random) {
  const pb::Reflection& reflection = *message.GetReflection();
  const auto set = [&](auto setter, auto repeated_setter, auto value) {
    if (index < 0) {
      (reflection.*setter)(&message, &field, value);
    } else {
      (reflection.*repeated_setter)(&message, &field, index, value);
    }
  };
  using R = pb::Reflection;
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT32:
      return set(&R::SetInt32, &R::SetRepeatedInt32, static_cast<int32_t>(RandomInt(random, 0)));
    case pb::FieldDescriptor::CPPTYPE_INT64: {
      const int64_t old = index < 0 ? reflection.GetInt64(message, &field)
                                    : reflection.GetRepeatedInt64(message, &field, index);
      return set(&R::SetInt64, &R::SetRepeatedInt64, RandomInt(random, old));
    }
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      return set(&R::SetUInt32, &R::SetRepeatedUInt32, static_cast<uint32_t>(RandomInt(random, 0)));
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return set(&R::SetUInt64, &R::SetRepeatedUInt64, static_cast<uint64_t>(RandomInt(random, 0)));
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return set(&R::SetDouble, &R::SetRepeatedDouble, RandomDouble(random));
    case pb::FieldDescriptor::CPPTYPE_FLOAT:
      return set(&R::SetFloat, &R::SetRepeatedFloat, static_cast<float>(RandomDouble(random)));
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return set(&R::SetBool, &R::SetRepeatedBool, (random() & 1) != 0);
    case pb::FieldDescriptor::CPPTYPE_ENUM:
      return set(&R::SetEnumValue, &R::SetRepeatedEnumValue, static_cast<int>(random() % 8) - 1);
    case pb::FieldDescriptor::CPPTYPE_STRING: {
      const std::string old = index < 0 ? reflection.GetString(message, &field)
                                        : reflection.GetRepeatedString(message, &field, index);
      return set(&R::SetString, &R::SetRepeatedString, MutateText(field, old, random));
    }
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      return MutateMessage(index < 0 ? *reflection.MutableMessage(&message, &field)
                                     : *reflection.MutableRepeatedMessage(&message, &field, index),
                           random);
  }
}

void AddEntry(pb::Message& message, const pb::FieldDescriptor& field, std::mt19937_64& random) {
  const pb::Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return reflection.AddInt64(&message, &field, RandomInt(random, 0));
    case pb::FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.AddFloat(&message, &field, static_cast<float>(RandomDouble(random)));
    case pb::FieldDescriptor::CPPTYPE_STRING:
      return reflection.AddString(&message, &field, MutateText(field, "", random));
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      reflection.AddMessage(&message, &field);
      return;
    default:
      return;  // the protocol has no such repeated fields
  }
}

void MutateRepeated(pb::Message& message, const pb::FieldDescriptor& field,
                    std::mt19937_64& random) {
  const pb::Reflection& reflection = *message.GetReflection();
  const int size = reflection.FieldSize(message, &field);
  const uint64_t what = random() % 8;
  if (size == 0 || what == 0) {
    AddEntry(message, field, random);
  } else if (what == 1) {
    reflection.RemoveLast(&message, &field);
  } else {
    MutateField(message, field, static_cast<int>(random() % static_cast<uint64_t>(size)), random);
  }
}

std::string MutateMessageBytes(std::string bytes, pb::Message& message, const FitMessage& fit,
                               std::mt19937_64& random) {
  if (random() % 4 == 0 || !message.ParseFromString(bytes)) return MutateBytes(bytes, random);
  for (uint64_t i = 1 + random() % 3; i > 0; --i) MutateMessage(message, random);
  if (fit && random() % 4 != 0) fit(message, random);
  return message.SerializePartialAsString();
}

}  // namespace

void Fail(const char* what, const char* file, int line, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n%s\n", file, line, what, detail.c_str());
  std::abort();
}

void RequireRefusal(const Status& status, std::initializer_list<Code> codes) {
  ATTEND_FUZZ_REQUIRE(std::find(codes.begin(), codes.end(), status.code()) != codes.end(),
                      status.ToString());
  ATTEND_FUZZ_REQUIRE(!status.message().empty(), status.ToString());
}

std::mt19937_64 RandomOf(std::string_view input) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, which is the same in every process
  for (const char c : input) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return std::mt19937_64(hash);
}

std::vector<std::string> Records(std::string_view input) {
  std::vector<std::string> records;
  while (input.size() > 2) {
    const size_t declared = static_cast<unsigned char>(input[0]) |
                            static_cast<size_t>(static_cast<unsigned char>(input[1])) << 8;
    input.remove_prefix(2);
    const size_t size = std::min(declared, input.size());
    records.emplace_back(input.substr(0, size));
    input.remove_prefix(size);
  }
  return records;
}

std::string Join(const std::vector<std::string>& records) {
  std::string input;
  for (const std::string& record : records) {
    const size_t size = std::min<size_t>(record.size(), 0xffff);
    input += static_cast<char>(size & 0xff);
    input += static_cast<char>(size >> 8);
    input.append(record, 0, size);
  }
  return input;
}

grpc::ByteBuffer Buffer(std::string_view bytes, std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  const size_t longest = 1 + random() % (bytes.size() + 1);
  while (!bytes.empty()) {
    const size_t step = std::min<size_t>(random() % (longest + 1), bytes.size());
    slices.emplace_back(bytes.data(), step);
    bytes.remove_prefix(step);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

InMessage Message(std::string_view bytes, std::mt19937_64& random) {
  return test::InPieces(bytes, random, 1 + random() % (bytes.size() + 1));
}

MemoryPeak::MemoryPeak() {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(OnMalloc, OnFree);
  ATTEND_FUZZ_REQUIRE(installed > 0, "the allocator takes no more hooks");
  before_ = heap_bytes.load();
  heap_peak.store(before_);
}

int64_t MemoryPeak::bytes() const { return heap_peak.load() - before_; }

void MutateMessage(pb::Message& message, std::mt19937_64& random) {
  const pb::Descriptor& type = *message.GetDescriptor();
  if (type.field_count() == 0) return;
  const pb::FieldDescriptor& field =
      *type.field(static_cast<int>(random() % static_cast<uint64_t>(type.field_count())));
  if (field.is_repeated()) return MutateRepeated(message, field, random);
  if (random() % 8 == 0) return message.GetReflection()->ClearField(&message, &field);
  MutateField(message, field, -1, random);
}

size_t MutateRecords(uint8_t* data, size_t size, size_t size_max, unsigned seed,
                     const MakeMessage& make, const FitMessage& fit) {
  static const auto* const silence = new pb::LogSilencer();
  (void)silence;
  std::mt19937_64 random(seed);
  std::vector<std::string> records = Records(View(data, size));
  if (random() % 4 == 0 || records.empty()) return LLVMFuzzerMutate(data, size, size_max);
  const size_t at = random() % records.size();
  switch (random() % 8) {
    case 0:
      records.insert(records.begin() + static_cast<ptrdiff_t>(at), records[at]);
      break;
    case 1:
      if (records.size() > 1) records.erase(records.begin() + static_cast<ptrdiff_t>(at));
      break;
    case 2:
      std::swap(records[at], records[random() % records.size()]);
      break;
    default:
      records[at] = MutateMessageBytes(std::move(records[at]), *make(at), fit, random);
  }
  const std::string joined = Join(records);
  if (joined.size() > size_max) return LLVMFuzzerMutate(data, size, size_max);
  joined.copy(reinterpret_cast<char*>(data), joined.size());
  return joined.size();
}

ssize_t Receive(int socket, void* bytes, size_t size) {
  ssize_t got;
  do {
    got = recv(socket, bytes, size, 0);
  } while (got < 0 && errno == EINTR);
  return got;
}

}  // namespace attend::fuzz
