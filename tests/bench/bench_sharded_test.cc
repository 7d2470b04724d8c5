// SPDX-License-Identifier: Apache-2.0
//
// The program runs, verifies its answers, and its JSON has every figure.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace attend::bench {
namespace {

TEST(BenchShardedTest, WritesEveryFigure) {
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) /
      ("bench_sharded_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
       ".json");
  const std::string command = std::string(BENCH_SHARDED_BINARY) +
                              " --servers 1,2 --contexts 1000 --prompts 100 --heads-q 4"
                              " --heads-kv 2 --dim 16 --seconds 0.05 --rounds 2"
                              " --session-memory 64MiB --json " +
                              path.string();
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  EXPECT_EQ(json["machine"]["device"], "cpu");
  EXPECT_GT(json["call_us"], 0);
  ASSERT_EQ(json["rows"].size(), 4u);
  for (const nlohmann::json& row : json["rows"]) {
    EXPECT_GT(row["us"], 0) << row;
    EXPECT_GT(row["kernel_us"], 0) << row;
    EXPECT_GT(row["model_us"], 0) << row;
    EXPECT_EQ(row["merge_us"] > 0, row["servers"] == 2) << row;
  }
  // All rows of Q and O, K and V in elements of 2 bytes. With two servers, the second has 44 keys,
  // and O and LSE have elements of 4 bytes.
  const double rows = 100 * 4 * 16, keys = 100 * 2 * 2 * 16 * 2;
  EXPECT_EQ(json["rows"][0]["bytes"], rows * 4 + keys);
  EXPECT_NEAR(json["rows"][1]["bytes"], rows * 1.44 * (2 + 4 + 4.0 / 16) + keys, 1);
}

}  // namespace
}  // namespace attend::bench
