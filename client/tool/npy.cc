// SPDX-License-Identifier: Apache-2.0
//
// The header is a Python dictionary literal with the keys descr, fortran_order and shape. The
// parser below accepts exactly that: any key order, either quote, optional trailing commas and
// spaces, as NumPy itself writes and reads it.

#include "client/tool/npy.h"

#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "client/tool/bool_bits.h"
#include "client/tool/file_io.h"

namespace attend::client {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr int64_t kNpyHeaderBytesMax = 1 << 16;

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : rest_(text) {}

  // False, with error() set, if the text is not such a dictionary.
  bool Parse(Header* header) {
    if (!Expect('{')) return false;
    while (!Peek('}')) {
      std::string key;
      if (!String(&key) || !Expect(':') || !Value(key, header)) return false;
      if (!Peek(',')) break;
      Expect(',');
    }
    if (!Expect('}')) return false;
    SkipSpace();
    if (!rest_.empty()) return Fail("text after the dictionary");
    if (!header->descr || !header->fortran_order || !header->shape) {
      return Fail("descr, fortran_order or shape is missing");
    }
    return true;
  }
  const std::string& error() const { return error_; }

 private:
  void SkipSpace() {
    while (!rest_.empty() && std::strchr(" \t\r\n", rest_.front()) != nullptr &&
           rest_.front() != '\0') {
      rest_.remove_prefix(1);
    }
  }
  bool Fail(std::string why) {
    if (error_.empty()) error_ = std::move(why);
    return false;
  }
  bool Peek(char c) {
    SkipSpace();
    return !rest_.empty() && rest_.front() == c;
  }
  bool Expect(char c) {
    if (!Peek(c)) return Fail(std::string("'") + c + "' expected");
    rest_.remove_prefix(1);
    return true;
  }
  bool String(std::string* out) {
    SkipSpace();
    if (rest_.empty() || (rest_.front() != '\'' && rest_.front() != '"')) {
      return Fail("a quoted string expected");
    }
    const size_t end = rest_.find(rest_.front(), 1);
    if (end == std::string_view::npos) return Fail("a string does not end");
    out->assign(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return true;
  }
  bool Value(const std::string& key, Header* header) {
    if (key == "descr" && !header->descr) {
      if (Peek('[')) return Fail("structured dtypes are not supported");
      return String(&header->descr.emplace());
    }
    if (key == "fortran_order" && !header->fortran_order) return Bool(header);
    if (key == "shape" && !header->shape) return Shape(&header->shape.emplace());
    return Fail("unexpected key '" + key.substr(0, 40) + "'");
  }
  bool Bool(Header* header) {
    SkipSpace();
    for (const auto& [word, value] : {std::pair{"True", true}, std::pair{"False", false}}) {
      if (!rest_.starts_with(word)) continue;
      rest_.remove_prefix(std::strlen(word));
      header->fortran_order = value;
      return true;
    }
    return Fail("fortran_order is neither True nor False");
  }
  bool Shape(std::vector<int64_t>* shape) {
    if (!Expect('(')) return false;
    while (!Peek(')')) {
      int64_t dim = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), dim);
      if (error != std::errc() || dim < 0) return Fail("shape has a bad dimension");
      if (shape->size() == kRankMax) return Fail("shape has too many dimensions");
      rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
      shape->push_back(dim);
      if (!Peek(',')) break;
      Expect(',');
    }
    return Expect(')');
  }

  std::string_view rest_;
  std::string error_;
};

Result<std::string> ReadNpyHeader(InputFile& file, int64_t* payload_bytes) {
  unsigned char start[8];
  if (file.size() < 10) return file.Error("too short for an .npy file");
  ATTEND_RETURN_IF_ERROR(file.Read(start, 8));
  if (std::memcmp(start, kMagic.data(), kMagic.size()) != 0) {
    const bool other = file.path().ends_with(".safetensors");
    return file.Error(other ? "a .safetensors file, not an .npy file; --safetensors takes it"
                            : "not an .npy file (wrong magic)");
  }
  const int major = start[6];
  if (major < 1 || major > 3) {
    return file.Error("format version " + std::to_string(major) + ", must be 1, 2 or 3");
  }
  unsigned char length[4] = {0, 0, 0, 0};
  const int length_bytes = major == 1 ? 2 : 4;
  ATTEND_RETURN_IF_ERROR(file.Read(length, length_bytes));
  const int64_t header_bytes =
      length[0] | length[1] << 8 | length[2] << 16 | static_cast<int64_t>(length[3]) << 24;
  *payload_bytes = file.size() - 8 - length_bytes - header_bytes;
  if (header_bytes > kNpyHeaderBytesMax || *payload_bytes < 0) {
    return file.Error("header of " + std::to_string(header_bytes) +
                      " bytes is longer than the file or than " +
                      std::to_string(kNpyHeaderBytesMax));
  }
  std::string header(static_cast<size_t>(header_bytes), '\0');
  ATTEND_RETURN_IF_ERROR(file.Read(header.data(), header_bytes));
  return header;
}

}  // namespace

Result<HostTensor> ReadNpy(const std::string& path) {
  Result<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  int64_t payload_bytes = 0;
  const Result<std::string> text = ReadNpyHeader(*file, &payload_bytes);
  if (!text.ok()) return text.status();
  Header header;
  HeaderParser parser(*text);
  if (!parser.Parse(&header)) return file->Error("bad header: " + parser.error());
  DType dtype;
  if (*header.descr == "|b1") {
    dtype = DType::kBit;
  } else if (*header.descr == "<f2") {
    dtype = DType::kFloat16;
  } else if (*header.descr == "<f4") {
    dtype = DType::kFloat32;
  } else if (header.descr->ends_with("V2")) {
    return file->Error("dtype '" + *header.descr +
                       "', as NumPy writes bfloat16, which .npy has no name for; save it as "
                       ".safetensors and give --safetensors");
  } else {
    return file->Error("dtype '" + header.descr->substr(0, 40) +
                       "', must be little-endian float16 ('<f2') or float32 ('<f4'), or bool "
                       "('|b1')");
  }
  if (*header.fortran_order) return file->Error("Fortran order, must be C order");
  const Result<int64_t> bytes = BytesInFile("array", dtype, *header.shape);
  if (!bytes.ok()) return file->Error(bytes.status().message());
  if (*bytes != payload_bytes) {
    return file->Error("shape " + ShapeText(*header.shape) + " needs " + std::to_string(*bytes) +
                       " bytes of data, the file has " + std::to_string(payload_bytes));
  }
  if (dtype == DType::kBit) return ReadBools(*file, *header.shape);
  Result<HostTensor> tensor = HostTensor::Make(path, dtype, *header.shape);
  if (!tensor.ok()) return tensor;
  ATTEND_RETURN_IF_ERROR(file->Read(tensor->data.get(), tensor->bytes));
  return tensor;
}

Status WriteNpy(const std::string& path, const HostTensor& tensor) {
  if (tensor.dtype == DType::kBFloat16) {
    return Status(Code::kFailedPrecondition,
                  path + ": .npy has no bfloat16; write a .safetensors file instead");
  }
  if (tensor.dtype == DType::kBit) {
    return Status(Code::kFailedPrecondition, path + ": bits are not written");
  }
  std::string header = std::string("{'descr': '") +
                       (tensor.dtype == DType::kFloat16 ? "<f2" : "<f4") +
                       "', 'fortran_order': False, 'shape': (";
  for (const int64_t dim : tensor.shape) header += std::to_string(dim) + ", ";
  if (tensor.shape.size() > 1) header.resize(header.size() - 2);
  if (tensor.shape.size() == 1) header.resize(header.size() - 1);
  header += "), }";
  // Magic, version, length and header together are a multiple of 64 bytes and end in a newline.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string start(kMagic);
  start += '\1';
  start += '\0';
  start += static_cast<char>(header.size() & 0xff);
  start += static_cast<char>(header.size() >> 8);
  start += header;
  return WriteFile(path, {{start.data(), static_cast<int64_t>(start.size())},
                          {tensor.data.get(), tensor.bytes}});
}

}  // namespace attend::client
