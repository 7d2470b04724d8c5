// SPDX-License-Identifier: Apache-2.0
//
// Files and arguments of attend-client: .npy and .safetensors tensors, call shapes, mixes of them,
// and the request of a dump. Every input is tried as each of them. A tensor that is accepted has
// the size of its shape, and is the same when it is written and read again. Memory stays within a
// multiple of the file's size.

#include <google/protobuf/stubs/logging.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>

#include "client/tool/call_spec.h"
#include "client/tool/file_io.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "client/wire/message_codec.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

// The input as a file in memory.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    ATTEND_FUZZ_REQUIRE(
        write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "memfd");
  }
  ~MemoryFile() { close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  const int fd_;
};

// A temporary folder of this process.
const std::string& Folder() {
  static const auto* const folder = [] {
    std::string pattern = std::filesystem::temp_directory_path() / "attend-fuzz-XXXXXX";
    auto* const made = new std::string(mkdtemp(pattern.data()));
    std::atexit([] { std::filesystem::remove_all(Folder()); });
    return made;
  }();
  return *folder;
}

void RequireSame(const client::HostTensor& a, const client::HostTensor& b) {
  ATTEND_FUZZ_REQUIRE(a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes,
                      client::ShapeText(a.shape) + client::ShapeText(b.shape));
  ATTEND_FUZZ_REQUIRE(
      a.bytes == 0 || std::memcmp(a.data.get(), b.data.get(), static_cast<size_t>(a.bytes)) == 0,
      "the bytes");
}

void RequireTensor(const client::HostTensor& tensor, size_t file_bytes) {
  const Result<int64_t> bytes = client::TensorBytes("tensor", tensor.dtype, tensor.shape);
  ATTEND_FUZZ_REQUIRE(
      bytes.ok() && *bytes == tensor.bytes && tensor.bytes <= static_cast<int64_t>(file_bytes),
      client::ShapeText(tensor.shape));
}

void ReadTensors(const std::string& path, size_t size) {
  const Result<client::HostTensor> npy = client::ReadNpy(path);
  if (npy.ok() && npy->dtype == DType::kBit) {
    RequireTensor(*npy, size);
  } else if (npy.ok()) {
    RequireTensor(*npy, size);
    const std::string again = Folder() + "/again.npy";
    ATTEND_FUZZ_REQUIRE(client::WriteNpy(again, *npy).ok(), again);
    const Result<client::HostTensor> read = client::ReadNpy(again);
    ATTEND_FUZZ_REQUIRE(read.ok(), read.status().ToString());
    RequireSame(*npy, *read);
  } else {
    RequireRefusal(npy.status(), {Code::kInvalidArgument});
  }
  const auto tensors = client::ReadSafetensors(path, {"q", "k", "v"});
  if (!tensors.ok()) return RequireRefusal(tensors.status(), {Code::kInvalidArgument});
  for (const auto& [name, tensor] : *tensors) RequireTensor(tensor, size);
  const bool bits = std::any_of(tensors->begin(), tensors->end(), [](const auto& each) {
    return each.second.dtype == DType::kBit;  // WriteSafetensors does not support them
  });
  if (bits) return;
  const std::string again = Folder() + "/again.safetensors";
  ATTEND_FUZZ_REQUIRE(client::WriteSafetensors(again, *tensors).ok(), again);
  const auto read = client::ReadSafetensors(again, {"q", "k", "v"});
  ATTEND_FUZZ_REQUIRE(read.ok() && read->size() == tensors->size(), read.status().ToString());
  for (const auto& [name, tensor] : *tensors) RequireSame(tensor, read->at(name));
}

void RequireSpec(const Result<client::CallSpec>& spec) {
  if (!spec.ok()) return RequireRefusal(spec.status(), {Code::kInvalidArgument});
  ATTEND_FUZZ_REQUIRE(spec->weight > 0 && spec->weight <= 1e9, spec->text);
  ATTEND_FUZZ_REQUIRE(
      spec->call.softcap >= 0 && (!spec->call.scale || std::isfinite(*spec->call.scale)),
      spec->text);
  double elements = 1;
  for (const int64_t size : {spec->batch, spec->heads_q, spec->heads_kv, spec->len_q, spec->len_k,
                             spec->dim, spec->dim_v}) {
    ATTEND_FUZZ_REQUIRE(size >= 0, spec->text);
    elements *= static_cast<double>(std::max<int64_t>(size, 1));
  }
  if (elements > 1e4) return;
  const Result<client::AttentionCall> call = client::MakeRandomCall(*spec, 1);
  if (!call.ok()) return RequireRefusal(call.status(), {Code::kInvalidArgument});
  ATTEND_FUZZ_REQUIRE(client::EncodedCall::Make(*call).ok(), spec->text);
}

void ReadSpecs(const std::string& path, std::string_view text) {
  RequireSpec(client::ParseCallSpec(std::string(text)));
  const Result<std::vector<client::CallSpec>> mix = client::ReadMix(path);
  if (!mix.ok()) return RequireRefusal(mix.status(), {Code::kInvalidArgument});
  ATTEND_FUZZ_REQUIRE(!mix->empty(), "an empty mix");
  for (const client::CallSpec& spec : *mix) RequireSpec(spec);
}

// As attend-client replay reads request.binpb, up to the message that it would send.
void ReadDump(std::string_view bytes) {
  auto request = std::make_shared<v1::AttendRequest>();
  if (!request->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const Result<client::AttentionCall> call = client::CallFromRequest(request);
  if (!call.ok()) return RequireRefusal(call.status(), {Code::kInvalidArgument});
  const Result<Attention> described = client::Describe(*call, nullptr, nullptr);
  if (!described.ok()) RequireRefusal(described.status(), {Code::kInvalidArgument});
  const auto encoded =
      client::EncodeCall(*call, client::CallTransport::kAuto, {.chunked_bytes_min = 1024});
  if (!encoded.ok()) RequireRefusal(encoded.status(), {Code::kInvalidArgument});
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attend::fuzz;
  static const auto* const silence = new google::protobuf::LogSilencer();
  (void)silence;
  const std::string_view input = View(data, size);
  const MemoryFile file(input);
  const int64_t small = 256 * static_cast<int64_t>(size) + (int64_t{2} << 20);
  {
    const MemoryPeak peak;
    ReadTensors(file.path(), size);
    ReadSpecs(file.path(), input);
    ATTEND_FUZZ_REQUIRE(peak.bytes() <= small, std::to_string(peak.bytes()) + " bytes");
  }
  const MemoryPeak peak;
  ReadDump(input);
  // Protobuf reserves up to 50,000,000 bytes for a string's declared length, before it checks that
  // the input has as many.
  constexpr int64_t kProtobufString = 50'000'000;
  ATTEND_FUZZ_REQUIRE(peak.bytes() <= small + kProtobufString,
                      std::to_string(peak.bytes()) + " bytes");
  return 0;
}
