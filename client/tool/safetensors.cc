// SPDX-License-Identifier: Apache-2.0

#include "client/tool/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/tool/bool_bits.h"
#include "client/tool/file_io.h"

namespace attend::client {
namespace {

using nlohmann::json;

constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;  // the format's own bound

struct Entry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t end = 0;
};

std::optional<DType> KnownDType(const std::string& name) {
  if (name == "F16") return DType::kFloat16;
  if (name == "BF16") return DType::kBFloat16;
  if (name == "F32") return DType::kFloat32;
  if (name == "BOOL") return DType::kBit;
  return std::nullopt;
}

// A non-negative integer below 2^62, so that the sum of two cannot overflow.
bool GetSize(const json& value, int64_t* out) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > (uint64_t{1} << 62)) return false;
  *out = value.get<int64_t>();
  return *out >= 0;
}

Result<Entry> ParseEntry(const InputFile& file, const std::string& name, const json& value) {
  const std::string where = "tensor '" + name.substr(0, 80) + "': ";
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    return file.Error(where + "dtype, shape or data_offsets is missing");
  }
  Entry entry;
  entry.name = name;
  const json& dtype = value["dtype"];
  const json& shape = value["shape"];
  const json& offsets = value["data_offsets"];
  if (!dtype.is_string()) return file.Error(where + "dtype is not a string");
  entry.dtype = dtype.get<std::string>();
  if (!shape.is_array() || shape.size() > kRankMax) return file.Error(where + "bad shape");
  for (const json& dim : shape) {
    if (!GetSize(dim, &entry.shape.emplace_back())) {
      return file.Error(where + "bad dimension in shape");
    }
  }
  if (!offsets.is_array() || offsets.size() != 2 || !GetSize(offsets[0], &entry.begin) ||
      !GetSize(offsets[1], &entry.end) || entry.end < entry.begin) {
    return file.Error(where + "bad data_offsets");
  }
  if (const auto known = KnownDType(entry.dtype)) {
    const Result<int64_t> bytes = BytesInFile("shape", *known, entry.shape);
    if (!bytes.ok()) return file.Error(where + bytes.status().message());
    if (*bytes != entry.end - entry.begin) {
      return file.Error(where + "shape " + ShapeText(entry.shape) + " needs " +
                        std::to_string(*bytes) + " bytes, data_offsets give " +
                        std::to_string(entry.end - entry.begin));
    }
  }
  return entry;
}

Result<std::vector<Entry>> ParseHeader(const InputFile& file, const std::string& text,
                                       int64_t data_bytes) {
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (header.is_discarded() || !header.is_object()) {
    return file.Error("the header is not a JSON object");
  }
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    Result<Entry> entry = ParseEntry(file, name, value);
    if (!entry.ok()) return entry.status();
    entries.push_back(std::move(*entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  int64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) {
      return file.Error("tensor '" + entry.name.substr(0, 80) + "' begins at byte " +
                        std::to_string(entry.begin) + ", must begin at " + std::to_string(at));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return file.Error("the tensors take " + std::to_string(at) + " bytes, the file has " +
                      std::to_string(data_bytes));
  }
  return entries;
}

Result<std::string> ReadSafetensorsHeader(InputFile& file, int64_t* data_bytes) {
  unsigned char length[8];
  if (file.size() < 8) return file.Error("too short for a .safetensors file");
  ATTEND_RETURN_IF_ERROR(file.Read(length, 8));
  if (std::memcmp(length, "\x93NUMPY", 6) == 0) {
    return file.Error("an .npy file, not a .safetensors file; --q, --k, --v and --bias take it");
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  if (header_bytes > static_cast<uint64_t>(std::min(kSafetensorsHeaderBytesMax, file.size() - 8))) {
    return file.Error("not a .safetensors file: its first 8 bytes announce a header of " +
                      std::to_string(header_bytes) + " bytes, longer than the file or than " +
                      std::to_string(kSafetensorsHeaderBytesMax));
  }
  std::string text(header_bytes, '\0');
  ATTEND_RETURN_IF_ERROR(file.Read(text.data(), static_cast<int64_t>(header_bytes)));
  *data_bytes = file.size() - 8 - static_cast<int64_t>(header_bytes);
  return text;
}

Result<HostTensor> ReadTensor(InputFile& file, DType dtype, const std::vector<int64_t>& shape) {
  if (dtype == DType::kBit) return ReadBools(file, shape);
  Result<HostTensor> tensor = HostTensor::Make(file.path(), dtype, shape);
  if (tensor.ok()) ATTEND_RETURN_IF_ERROR(file.Read(tensor->data.get(), tensor->bytes));
  return tensor;
}

}  // namespace

Result<std::map<std::string, HostTensor>> ReadSafetensors(const std::string& path,
                                                          const std::vector<std::string>& wanted) {
  Result<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  int64_t data_bytes = 0;
  const Result<std::string> text = ReadSafetensorsHeader(*file, &data_bytes);
  if (!text.ok()) return text.status();
  const Result<std::vector<Entry>> entries = ParseHeader(*file, *text, data_bytes);
  if (!entries.ok()) return entries.status();
  std::map<std::string, HostTensor> tensors;
  std::vector<char> skipped(1 << 16);
  for (const Entry& entry : *entries) {
    if (std::find(wanted.begin(), wanted.end(), entry.name) != wanted.end()) {
      const auto dtype = KnownDType(entry.dtype);
      if (!dtype) {
        return file->Error("tensor '" + entry.name + "': dtype " + entry.dtype.substr(0, 40) +
                           ", must be F16, BF16, F32 or BOOL");
      }
      Result<HostTensor> tensor = ReadTensor(*file, *dtype, entry.shape);
      if (!tensor.ok()) return tensor.status();
      tensors.emplace(entry.name, std::move(*tensor));
      continue;
    }
    for (int64_t left = entry.end - entry.begin; left > 0;) {
      const int64_t step = std::min<int64_t>(left, static_cast<int64_t>(skipped.size()));
      ATTEND_RETURN_IF_ERROR(file->Read(skipped.data(), step));
      left -= step;
    }
  }
  return tensors;
}

Status WriteSafetensors(const std::string& path, const std::map<std::string, HostTensor>& tensors) {
  json header = json::object();
  int64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dtype == DType::kBit) {
      return Status(Code::kFailedPrecondition, path + ": bits are not written");
    }
    const char* dtype = tensor.dtype == DType::kFloat16    ? "F16"
                        : tensor.dtype == DType::kBFloat16 ? "BF16"
                                                           : "F32";
    header[name] = {
        {"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes}}};
    at += tensor.bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data begins at a multiple of 8
  std::string start(8, '\0');
  for (int i = 0; i < 8; ++i) start[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  start += text;
  std::vector<Piece> pieces = {{start.data(), static_cast<int64_t>(start.size())}};
  for (const auto& [name, tensor] : tensors) pieces.push_back({tensor.data.get(), tensor.bytes});
  return WriteFile(path, pieces);
}

}  // namespace attend::client
