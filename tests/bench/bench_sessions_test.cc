// SPDX-License-Identifier: Apache-2.0
//
// The program runs, verifies its answers, and its JSON has every figure.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace attend::bench {
namespace {

class BenchSessionsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(BenchSessionsTest, WritesEveryFigure) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) /
      ("bench_sessions_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
       GetParam());
  const std::string path = folder.string() + ".json";
  const std::string command = std::string(BENCH_SESSIONS_BINARY) +
                              " --sessions 2 --context 70 --heads-q 4 --heads-kv 2 --dim 16"
                              " --seconds 0.05 --rounds 2 --threads 2 --fork-tokens 100"
                              " --session-memory 64MiB --json " +
                              path + " " + GetParam();
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  EXPECT_EQ(json["machine"]["device"], "cpu");
  EXPECT_FALSE(json["machine"]["build"].get<std::string>().empty());
  EXPECT_EQ(json["settings"]["context"], 70);
  EXPECT_EQ(json["settings"]["streams"], std::string(GetParam()) == "--streams");
  // A token's Q, O, K and V, in elements of 2 bytes.
  EXPECT_EQ(json["bytes"]["step"], (2 * 4 + 2 * 2) * 16 * 2);
  EXPECT_EQ(json["bytes"]["whole"], (2 * 4 + 2 * 2 * 71) * 16 * 2);
  ASSERT_EQ(json["rows"].size(), 5u);
  for (const nlohmann::json& row : json["rows"]) {
    EXPECT_GT(row["per_second"], 0) << row;
    EXPECT_GT(row["p50_us"], 0) << row;
    EXPECT_GE(row["p99_us"], row["p50_us"]) << row;
    EXPECT_EQ(row["per_second_rounds"].size(), 2u) << row;
  }
  for (const char* side : {"attend", "echo"}) {
    ASSERT_EQ(json["reads"][side]["per_second_rounds"].size(), 2u) << side;
    EXPECT_GT(json["reads"][side]["per_second_rounds"][0], 0) << side;
    EXPECT_GT(json["reads"][side]["server_us_rounds"][0], 0) << side;
  }
  EXPECT_GT(json["memory_bytes_per_second"][0], 0);
  EXPECT_EQ(json["fork"]["tokens"], 100);
  EXPECT_EQ(json["fork"]["us"].size(), 30u);
}

INSTANTIATE_TEST_SUITE_P(All, BenchSessionsTest, ::testing::Values("", "--streams"));

}  // namespace
}  // namespace attend::bench
