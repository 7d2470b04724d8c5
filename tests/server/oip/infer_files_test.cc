// SPDX-License-Identifier: Apache-2.0
//
// Inputs in files that clients share: sums of claimed sizes do not overflow, and memory is
// allocated only for small inputs or within a grant.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "tests/server/support/infer_fixture.h"

namespace attend {
namespace {

using inference::ModelInferRequest;
using test::Decoded;
using test::PlainInfer;
using ::testing::HasSubstr;

class InferFilesTest : public test::InferRequestTest {};

// A sparse file of any size, as shared by a client; it takes no memory.
class SparseFile {
 public:
  explicit SparseFile(int64_t bytes) {
    const int file = shm_open(key_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    EXPECT_GE(file, 0) << strerror(errno);
    EXPECT_EQ(ftruncate(file, bytes), 0) << strerror(errno);
    close(file);
  }
  ~SparseFile() { shm_unlink(key_.c_str()); }
  const std::string& key() const { return key_; }

 private:
  const std::string key_ = test::kInferKeyPrefix + std::to_string(getpid());
};

// Sums of claimed sizes do not overflow, and no memory is allocated for them.
TEST_F(InferFilesTest, HugeInputsAreRefusedWithoutOverflow) {
  const SparseFile file(INT64_MAX);
  ASSERT_TRUE(regions_.RegisterFile(0, "huge", file.key(), 0, INT64_MAX).ok());
  const auto in_file = [](ModelInferRequest::InferInputTensor& input, int64_t bytes) {
    test::PutInRegion("huge", bytes, 0, *input.mutable_parameters());
  };
  constexpr int64_t kMost = INT64_MAX - 7;  // a multiple of 8
  const auto numbers = [&](int64_t first, int64_t second) {
    return [=](ModelInferRequest& m) {
      for (const auto& [name, bytes] : {std::pair("cu_q", first), std::pair("cu_kv", second)}) {
        auto* const input = m.add_inputs();
        input->set_name(name);
        input->set_datatype("INT64");
        input->add_shape(bytes / 8);
        in_file(*input, bytes);
      }
    };
  };
  const std::string packed = "attention_fp32_packed_full";
  for (const auto& [first, second] :
       {std::pair(kMost, kMost), std::pair(int64_t{16}, kMost), std::pair(kMost, int64_t{16}),
        std::pair(int64_t{4} << 20, int64_t{8})}) {
    ExpectRefused(numbers(first, second), Code::kInvalidArgument, "must have at most 4194304",
                  packed);
  }
  // Tensors are added up only if their sizes match their shapes.
  ModelInferRequest infer = PlainInfer();
  infer.clear_raw_input_contents();
  for (auto& each : *infer.mutable_inputs()) in_file(each, kMost);
  std::mt19937_64 random(1);
  Decoded out;
  Decode(format_, Buffer(infer.SerializeAsString(), random), out);
  EXPECT_EQ(out.status.code(), Code::kInvalidArgument);
  EXPECT_THAT(out.status.message(),
              HasSubstr("q.byte_length is " + std::to_string(kMost) + ", must be 128"));
  EXPECT_EQ(out.request.file_bytes.input, 0);
  for (auto& each : *infer.mutable_inputs()) in_file(each, 128);
  Decoded good;
  Decode(format_, Buffer(infer.SerializeAsString(), random), good);
  EXPECT_TRUE(good.status.ok()) << good.status.ToString();
  EXPECT_EQ(good.request.file_bytes.input, 3 * 128);
}

}  // namespace
}  // namespace attend
