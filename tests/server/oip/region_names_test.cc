// SPDX-License-Identifier: Apache-2.0
//
// Files that clients register as regions: which are allowed, which tenant owns them, and what
// happens if they change under the server.

#include "server/oip/region_names.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/kernels/support/counted_new.h"
#include "tests/server/support/temporary_directory.h"

namespace attend::oip {
namespace {

using ::testing::HasSubstr;
using Kind = RegionNames::Kind;

class RegionNamesTest : public ::testing::Test {
 protected:
  RegionNamesTest() {
    options_.files = SharedFile::Rules{"/in", geteuid(), folder_.path()};
    options_.regions_max = 3;
    Write("in0", 1000);
  }
  void Write(const std::string& name, size_t bytes) {
    std::ofstream(folder_.path() / name, std::ios::binary) << std::string(bytes, 'a');
  }
  static void Expect(const Status& status, Code code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr(part));
  }

  const test::TemporaryDirectory folder_;
  RegionNames::Options options_;
};

TEST_F(RegionNamesTest, ANameBelongsToItsTenant) {
  options_.tenants = {"default", "b"};
  Write("indefault:0", 1000);
  Write("inb:0", 1000);
  RegionNames names(options_);
  ASSERT_TRUE(names.RegisterFile(0, "a", "/indefault:0", 0, 1000).ok());
  Expect(names.RegisterFile(0, "a", "/indefault:0", 0, 10), Code::kAlreadyExists,
         "'a' already in manager");
  Expect(names.Find(1, "a").status(), Code::kNotFound, "Unable to find shared memory region: 'a'");
  ASSERT_TRUE(names.RegisterFile(1, "a", "/inb:0", 8, 100).ok());
  EXPECT_EQ((*names.Find(0, "a"))->bytes, 1000);
  EXPECT_EQ((*names.Find(1, "a"))->offset, 8);
  names.Unregister(1, Kind::kFile, "", nullptr);
  EXPECT_EQ(names.List(1, Kind::kFile, "")->size(), 0u);
  EXPECT_EQ(names.List(0, Kind::kFile, "")->size(), 1u);
  Expect(names.List(1, Kind::kFile, "a").status(), Code::kNotFound, "'a'");
  names.Unregister(0, Kind::kGpu, "a", nullptr);  // it is not GPU memory
  EXPECT_TRUE(names.Find(0, "a").ok());
  names.Unregister(0, Kind::kFile, "b", nullptr);  // no error, as in Triton
  names.Unregister(0, Kind::kFile, "a", nullptr);
  EXPECT_FALSE(names.Find(0, "a").ok());
}

TEST_F(RegionNamesTest, RefusesRegionsBeyondTheirFile) {
  RegionNames names(options_);
  const auto refuse = [&](uint64_t offset, uint64_t bytes, const char* part) {
    Expect(names.RegisterFile(0, "a", "/in0", offset, bytes), Code::kInvalidArgument, part);
  };
  refuse(0, 1001, "offset is 0 and byte_size 1001, key /in0 has 1000 bytes");
  refuse(1, 1000, "offset is 1 and byte_size 1000");
  refuse(UINT64_MAX, 1, "Invalid offset + byte size");
  refuse(0, 0, "byte_size is 0, must be at least 1");
  refuse(0, UINT64_MAX, "must be at least 1 and below 2^63");
  Expect(names.RegisterFile(0, "", "/in0", 0, 1), Code::kInvalidArgument, "name has 0 bytes");
  Expect(names.RegisterFile(0, std::string(300, 'n'), "/in0", 0, 1), Code::kInvalidArgument,
         "name has 300 bytes, must have 1 to 256");
  // Refused registrations have taken neither the name nor a place.
  for (const char* const name : {"a", "b", "c"}) {
    EXPECT_TRUE(names.RegisterFile(0, name, "/in0", 0, 10).ok());
  }
  Expect(names.RegisterFile(0, "d", "/in0", 0, 10), Code::kResourceExhausted, "at most 3");
}

TEST_F(RegionNamesTest, AFileBelongsToItsTenant) {
  options_.tenants = {"default", "a", "b", "a-b"};
  RegionNames names(options_);
  const auto key = [&](int tenant) { return "/in" + options_.tenants[tenant] + ":0"; };
  for (int owner = 0; owner < 4; ++owner) {
    Write(key(owner).substr(1), 10);
    for (int other = 0; other < 4; ++other) {
      if (other == owner) continue;
      Expect(names.RegisterFile(other, "x", key(owner), 0, 10), Code::kPermissionDenied,
             "must begin with /in" + options_.tenants[other] + ":");
    }
    EXPECT_TRUE(names.RegisterFile(owner, "x", key(owner), 0, 10).ok());
    names.Unregister(owner, Kind::kFile, "x", nullptr);
  }
  Expect(names.RegisterFile(1, "y", "/in0", 0, 10), Code::kPermissionDenied, "/ina:");
}

TEST_F(RegionNamesTest, ATenantsFilesAreBounded) {
  options_.files_bytes_max = 1000;
  options_.tenants = {"default", "b"};
  for (const char* const name : {"indefault:0", "inb:0"}) Write(name, 1001);
  RegionNames names(options_);
  Expect(names.RegisterFile(0, "a", "/indefault:0", 0, 1001), Code::kResourceExhausted,
         "byte_size is 1001");
  ASSERT_TRUE(names.RegisterFile(0, "a", "/indefault:0", 0, 600).ok());
  Expect(names.RegisterFile(0, "b", "/indefault:0", 0, 401), Code::kResourceExhausted,
         "byte_size is 401 and the tenant's other system shared memory regions have 600 bytes, "
         "together they may have at most 1000 (oip-shared-memory-bytes)");
  Expect(names.RegisterFile(0, "b", "/indefault:0", 0, INT64_MAX), Code::kResourceExhausted,
         "at most 1000");
  // A registration that fails later is not charged.
  Expect(names.RegisterFile(0, "b", "/indefault:1", 0, 400), Code::kNotFound, "indefault:1");
  Expect(names.RegisterFile(0, "b", "/indefault:0", 900, 400), Code::kInvalidArgument, "900");
  EXPECT_TRUE(names.RegisterFile(0, "b", "/indefault:0", 0, 400).ok());
  EXPECT_TRUE(names.RegisterFile(1, "a", "/inb:0", 0, 1000).ok());
  names.Unregister(0, Kind::kFile, "a", nullptr);
  EXPECT_TRUE(names.RegisterFile(0, "a", "/indefault:0", 0, 600).ok());
  names.Unregister(0, Kind::kFile, "", nullptr);
  EXPECT_TRUE(names.RegisterFile(0, "c", "/indefault:0", 0, 1000).ok());
}

TEST_F(RegionNamesTest, OpensOnlyFilesWithThePrefixAndOwner) {
  RegionNames names(options_);
  const auto refuse = [&](const std::string& key, Code code, const char* part) {
    Expect(names.RegisterFile(0, "a", key, 0, 1), code, part);
  };
  Write("other", 10);
  refuse("/other", Code::kPermissionDenied, "key /other must begin with /in");
  refuse("in0", Code::kInvalidArgument, "must be a slash followed by a name without slashes");
  refuse("/in/../in0", Code::kInvalidArgument, "without slashes");
  refuse("/..", Code::kInvalidArgument, "without slashes");
  refuse("", Code::kInvalidArgument, "key has 0 bytes");
  refuse("/in" + std::string(300, 'x'), Code::kInvalidArgument, "must have 2 to 256");
  refuse("/in1", Code::kNotFound, "cannot be opened: No such file");
  std::filesystem::create_symlink(folder_.path() / "other", folder_.path() / "in2");
  refuse("/in2", Code::kPermissionDenied, "cannot be opened");
  std::filesystem::create_directory(folder_.path() / "in3");
  refuse("/in3", Code::kPermissionDenied, "cannot be opened");
  ASSERT_EQ(mkfifo((folder_.path() / "in4").c_str(), 0600), 0);
  refuse("/in4", Code::kInvalidArgument, "is not a regular file");
  std::filesystem::create_hard_link(folder_.path() / "other", folder_.path() / "in5");
  refuse("/in5", Code::kPermissionDenied, "has 2 hard links, must have 1");
  std::filesystem::remove(folder_.path() / "other");
  EXPECT_TRUE(names.RegisterFile(0, "a", "/in5", 0, 1).ok());

  options_.files->owner = geteuid() + 1;
  RegionNames others(options_);
  Expect(others.RegisterFile(0, "a", "/in0", 0, 1), Code::kPermissionDenied,
         "must belong to user " + std::to_string(geteuid() + 1));
}

TEST_F(RegionNamesTest, AFileThatShrinksIsAnError) {
  RegionNames names(options_);
  ASSERT_TRUE(names.RegisterFile(0, "a", "/in0", 0, 1000).ok());
  const NamedRegionRef region = *names.Find(0, "a");
  names.Unregister(0, Kind::kFile, "a", nullptr);  // regions in use stay
  char bytes[1000];
  ASSERT_TRUE(region->file->Read(0, bytes, 1000).ok());
  EXPECT_EQ(bytes[999], 'a');
  ASSERT_EQ(truncate((folder_.path() / "in0").c_str(), 500), 0);
  Expect(region->file->Read(0, bytes, 1000), Code::kInvalidArgument,
         "key /in0 has 500 bytes now, too few for 1000 at offset 0");
  Expect(region->file->Write(400, bytes, 200), Code::kInvalidArgument,
         "has 500 bytes now, too few for 200 at offset 400");
  EXPECT_EQ(std::filesystem::file_size(folder_.path() / "in0"), 500u);
  EXPECT_TRUE(region->file->Write(400, "xyz", 3).ok());
  EXPECT_TRUE(region->file->Read(400, bytes, 3).ok());
  EXPECT_EQ(std::string(bytes, 3), "xyz");
}

TEST_F(RegionNamesTest, AFailedRegistrationLeavesTheNameFree) {
  RegionNames names(options_);
  const std::string name(100, 'n'), key = "/in0";
  int64_t failed = 0;
  for (bool reached = true; reached; ++failed) {
    bool thrown = false;
    {
      const test::HeapFault fault(failed + 1);
      try {
        EXPECT_TRUE(names.RegisterFile(0, name, key, 0, 10).ok());
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      reached = fault.reached();
    }
    EXPECT_EQ(thrown, reached);
    if (thrown) {
      Expect(names.Find(0, name).status(), Code::kNotFound, "Unable to find");
      EXPECT_TRUE(names.RegisterFile(0, name, key, 0, 10).ok()) << "allocation " << failed + 1;
    }
    names.Unregister(0, Kind::kFile, name, nullptr);
  }
  EXPECT_GT(failed, 3);
}

TEST_F(RegionNamesTest, DisabledKindsAreUnimplemented) {
  RegionNames names({});
  Expect(names.RegisterFile(0, "a", "/in0", 0, 1), Code::kUnimplemented, "--oip-shared-memory");
  Expect(names.RegisterGpu(0, "a", std::string(64, 'h'), 0, 1), Code::kUnimplemented,
         "--oip-cuda-shared-memory");
}

}  // namespace
}  // namespace attend::oip
