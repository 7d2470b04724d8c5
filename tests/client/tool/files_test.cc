// SPDX-License-Identifier: Apache-2.0
//
// .npy and .safetensors: files round-trip, NumPy's own files are read, and everything else is
// refused with the file's name and a reason.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "client/call/random.h"
#include "client/tool/file_io.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

std::string Path(const std::string& name) { return ScratchPath(name); }

void Put(const std::string& path, const std::string& bytes) {
  ASSERT_TRUE(WriteFile(path, {{bytes.data(), static_cast<int64_t>(bytes.size())}}).ok());
}

HostTensor RandomTensor(DType dtype, std::vector<int64_t> shape, uint64_t seed) {
  HostTensor tensor = *HostTensor::Make("t", dtype, std::move(shape));
  Random random(seed);
  for (int64_t i = 0; i < tensor.bytes; ++i) {
    tensor.data[i] = static_cast<std::byte>(random.Bits());
  }
  return tensor;
}

void ExpectEqual(const HostTensor& a, const HostTensor& b) {
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.shape, b.shape);
  ASSERT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(std::memcmp(a.data.get(), b.data.get(), static_cast<size_t>(a.bytes)), 0);
}

// As NumPy writes it, for any header text.
std::string Npy(const std::string& header, const std::string& data, char major = 1) {
  std::string text = header;
  const size_t start = major == 1 ? 10 : 12;
  text.append(63 - (start + text.size()) % 64, ' ');
  text += '\n';
  std::string bytes = "\x93NUMPY";
  bytes += major;
  bytes += '\0';
  bytes += static_cast<char>(text.size() & 0xff);
  bytes += static_cast<char>(text.size() >> 8);
  if (major > 1) bytes.append(2, '\0');
  return bytes + text + data;
}

std::string NpyError(const std::string& bytes) {
  const std::string path = Path("bad.npy");
  Put(path, bytes);
  const Result<HostTensor> tensor = ReadNpy(path);
  EXPECT_FALSE(tensor.ok());
  if (tensor.ok()) return "";
  EXPECT_THAT(tensor.status().message(), HasSubstr(path));
  return tensor.status().message();
}

TEST(Npy, RoundTrip) {
  ATTEND_FRESH_SEED(seed);
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{}, {7}, {2, 3}, {1, 2, 3, 5}, {4, 0, 3, 2}}) {
      const HostTensor tensor = RandomTensor(dtype, shape, seed);
      ASSERT_TRUE(WriteNpy(Path("a.npy"), tensor).ok());
      const Result<HostTensor> read = ReadNpy(Path("a.npy"));
      ASSERT_TRUE(read.ok()) << read.status().ToString();
      ExpectEqual(tensor, *read);
    }
  }
}

TEST(Npy, DataBeginsAtAMultipleOf64) {
  for (int64_t n = 1; n < 2000; n = n * 3 + 1) {
    const HostTensor tensor = RandomTensor(DType::kFloat32, {n}, 1);
    ASSERT_TRUE(WriteNpy(Path("b.npy"), tensor).ok());
    EXPECT_EQ((InputFile::Open(Path("b.npy"))->size() - tensor.bytes) % 64, 0);
  }
}

TEST(Npy, ReadsEveryHeaderThatNumPyAllows) {
  const std::string data(24, 'x');
  for (const std::string& header :
       {std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"),
        std::string("{'shape': (2, 3), 'descr': '<f4', 'fortran_order': False}"),
        std::string("{\"descr\":\"<f4\",\"fortran_order\":False,\"shape\":(2,3,),}"),
        std::string("{'descr': '<f2', 'fortran_order': False, 'shape': (12,), }"),
        std::string("  {'descr': '<f4', 'fortran_order': False, 'shape': (6,), }  ")}) {
    for (const char major : {1, 2, 3}) {
      Put(Path("c.npy"), Npy(header, data, major));
      const Result<HostTensor> read = ReadNpy(Path("c.npy"));
      EXPECT_TRUE(read.ok()) << header << ": " << read.status().ToString();
    }
  }
}

// Rows begin on bytes, the first key in the lowest bit.
void ExpectBits(const HostTensor& tensor) {
  EXPECT_EQ(tensor.dtype, DType::kBit);
  EXPECT_EQ(ShapeText(tensor.shape), "[2, 9]");
  ASSERT_EQ(tensor.bytes, 4);
  EXPECT_EQ(std::memcmp(tensor.data.get(), "\x81\x01\x02\x00", 4), 0);
}
const std::string kBools("\1\0\0\0\0\0\0\1\1\0\1\0\0\0\0\0\0\0", 18);

TEST(Npy, BooleansAreReadAsBits) {
  Put(Path("b.npy"), Npy("{'descr': '|b1', 'fortran_order': False, 'shape': (2, 9), }", kBools));
  const Result<HostTensor> read = ReadNpy(Path("b.npy"));
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ExpectBits(*read);
  EXPECT_EQ(WriteNpy(Path("c.npy"), *read).code(), Code::kFailedPrecondition);
  EXPECT_THAT(NpyError(Npy("{'descr': '|b1', 'fortran_order': False, 'shape': (2, 8), }", kBools)),
              HasSubstr("shape [2, 8] needs 16 bytes of data, the file has 18"));
}

TEST(Npy, ErrorsNameTheActualType) {
  for (const char* descr : {"<V2", "|V2"}) {
    const std::string header =
        std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (1,), }";
    EXPECT_THAT(NpyError(Npy(header, "xx")), HasSubstr("as NumPy writes bfloat16"));
  }
  const HostTensor tensor = RandomTensor(DType::kFloat32, {2}, 1);
  ASSERT_TRUE(WriteSafetensors(Path("t.safetensors"), {{"q", tensor}}).ok());
  EXPECT_THAT(ReadNpy(Path("t.safetensors")).status().message(), HasSubstr("--safetensors"));
  ASSERT_TRUE(WriteNpy(Path("t.npy"), tensor).ok());
  EXPECT_THAT(ReadSafetensors(Path("t.npy"), {"q"}).status().message(),
              HasSubstr("an .npy file, not a .safetensors file"));
}

TEST(Files, UnwritableFilesAreDetectedBeforehand) {
  const std::string there = Path("there"), here = Path("new");
  Put(there, "kept");
  EXPECT_TRUE(CheckWritable(there).ok());
  EXPECT_EQ(*ReadWholeFile(there), "kept");
  EXPECT_TRUE(CheckWritable(here).ok());
  EXPECT_FALSE(ReadWholeFile(here).ok()) << "none is left behind";
  EXPECT_FALSE(CheckWritable(Path("")).ok()) << "a folder";
  EXPECT_FALSE(CheckWritable(Path("nowhere/new")).ok());
}

TEST(Npy, RefusesOtherContents) {
  const auto header = [](const std::string& descr, const char* order, const std::string& shape) {
    return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }";
  };
  const std::string data(24, 'x');
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "True", "(2, 3)"), data)), HasSubstr("Fortran order"));
  EXPECT_THAT(NpyError(Npy(header("'>f4'", "False", "(2, 3)"), data)), HasSubstr(">f4"));
  EXPECT_THAT(NpyError(Npy(header("'<f8'", "False", "(3,)"), data)), HasSubstr("<f8"));
  EXPECT_THAT(NpyError(Npy(header("'|O'", "False", "(3,)"), data)), HasSubstr("|O"));
  EXPECT_THAT(NpyError(Npy(header("[('a', '<f4')]", "False", "(6,)"), data)),
              HasSubstr("structured"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(2, 4)"), data)), HasSubstr("24"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(2, -3)"), data)), HasSubstr("dimension"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(4611686018427387904, 4)"), data)),
              HasSubstr("overflow"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(99999999999999999999,)"), data)),
              HasSubstr("dimension"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "maybe", "(6,)"), data)), HasSubstr("fortran_order"));
  EXPECT_THAT(NpyError(Npy("{'descr': '<f4', 'shape': (6,), }", data)), HasSubstr("missing"));
  EXPECT_THAT(NpyError(Npy("{'descr': '<f4', 'evil': 1}", data)), HasSubstr("evil"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(6,)") + "junk", data)), HasSubstr("after"));
  EXPECT_THAT(NpyError(Npy("{'descr': '<f4", data)), HasSubstr("bad header"));
  EXPECT_THAT(NpyError(Npy(header("'<f4'", "False", "(6,)"), data, 9)), HasSubstr("version 9"));
  EXPECT_THAT(NpyError("PK\x03\x04 not an array"), HasSubstr("magic"));
  EXPECT_THAT(NpyError(""), HasSubstr("too short"));
}

TEST(Npy, EveryTruncationIsRefused) {
  const std::string whole =
      Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", std::string(24, 'x'));
  for (size_t size = 0; size < whole.size(); ++size) NpyError(whole.substr(0, size));
  NpyError(whole + "x");
}

TEST(Npy, MissingAndSpecialFilesAreRefusedByName) {
  EXPECT_EQ(ReadNpy(Path("none.npy")).status().code(), Code::kNotFound);
  EXPECT_THAT(ReadNpy(::testing::TempDir()).status().message(), HasSubstr(::testing::TempDir()));
  EXPECT_THAT(WriteNpy(Path("x.npy"), RandomTensor(DType::kBFloat16, {2}, 1)).message(),
              HasSubstr("bfloat16"));
  EXPECT_FALSE(WriteNpy(Path("none/x.npy"), RandomTensor(DType::kFloat32, {2}, 1)).ok());
}

std::string Safetensors(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + data;
}

std::string SafetensorsError(const std::string& bytes) {
  const std::string path = Path("bad.safetensors");
  Put(path, bytes);
  const auto tensors = ReadSafetensors(path, {"q"});
  EXPECT_FALSE(tensors.ok());
  if (tensors.ok()) return "";
  EXPECT_THAT(tensors.status().message(), HasSubstr(path));
  return tensors.status().message();
}

TEST(Safetensors, RoundTrip) {
  ATTEND_FRESH_SEED(seed);
  const std::map<std::string, HostTensor> tensors = {
      {"q", RandomTensor(DType::kBFloat16, {2, 3, 5}, seed)},
      {"k", RandomTensor(DType::kFloat16, {7}, seed + 1)},
      {"v", RandomTensor(DType::kFloat32, {}, seed + 2)},
      {"empty", RandomTensor(DType::kFloat32, {3, 0}, seed + 3)}};
  ASSERT_TRUE(WriteSafetensors(Path("a.safetensors"), tensors).ok());
  const auto read = ReadSafetensors(Path("a.safetensors"), {"q", "k", "v", "empty", "none"});
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_EQ(read->size(), tensors.size());
  for (const auto& [name, tensor] : tensors) ExpectEqual(tensor, read->at(name));
}

TEST(Safetensors, BooleansAreReadAsBits) {
  Put(Path("b.safetensors"),
      Safetensors(R"({"bias":{"dtype":"BOOL","shape":[2,9],"data_offsets":[0,18]}}  )", kBools));
  const auto read = ReadSafetensors(Path("b.safetensors"), {"bias"});
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ExpectBits(read->at("bias"));
  EXPECT_EQ(WriteSafetensors(Path("c.safetensors"), *read).code(), Code::kFailedPrecondition);
}

TEST(Safetensors, SkipsUnwantedAndUnsupportedTensors) {
  Put(Path("b.safetensors"),
      Safetensors(
          R"({"__metadata__":{"by":"x"},"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
          R"("q":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}  )",
          "12345678abcdefgh"));
  const auto read = ReadSafetensors(Path("b.safetensors"), {"q"});
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_EQ(read->size(), 1u);
  EXPECT_EQ(std::memcmp(read->at("q").data.get(), "abcdefgh", 8), 0);
  EXPECT_THAT(ReadSafetensors(Path("b.safetensors"), {"ids"}).status().message(), HasSubstr("I64"));
}

TEST(Safetensors, RefusesOtherContents) {
  const auto one = [](const std::string& entry) {
    return Safetensors("{\"q\":" + entry + "}", "12345678");
  };
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})")),
              HasSubstr("12"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,16]})")),
              HasSubstr("data_offsets"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})")),
              HasSubstr("must begin at 0"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})")),
              HasSubstr("the file has 8"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})")),
              HasSubstr("data_offsets"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")),
              HasSubstr("dimension"));
  EXPECT_THAT(SafetensorsError(
                  one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})")),
              HasSubstr("overflow"));
  EXPECT_THAT(SafetensorsError(
                  one(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})")),
              HasSubstr("dimension"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":"F32","shape":[2.5],"data_offsets":[0,8]})")),
              HasSubstr("dimension"));
  EXPECT_THAT(SafetensorsError(one(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})")),
              HasSubstr("dtype"));
  EXPECT_THAT(SafetensorsError(one(R"({"shape":[2],"data_offsets":[0,8]})")), HasSubstr("missing"));
  EXPECT_THAT(SafetensorsError(one("3")), HasSubstr("missing"));
  EXPECT_THAT(SafetensorsError(Safetensors("{\"q\"", "")), HasSubstr("JSON"));
  EXPECT_THAT(SafetensorsError(Safetensors("[]", "")), HasSubstr("JSON"));
  EXPECT_THAT(SafetensorsError(std::string(8, '\xff')), HasSubstr("longer than the file"));
  EXPECT_THAT(SafetensorsError("short"), HasSubstr("too short"));
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string whole =
      Safetensors(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  for (size_t size = 0; size < whole.size(); ++size) SafetensorsError(whole.substr(0, size));
  SafetensorsError(whole + "x");
}

}  // namespace
}  // namespace attend::client
