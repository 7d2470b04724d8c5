// SPDX-License-Identifier: Apache-2.0

#include "server/app/devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/server/support/fake_backend.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A machine some of whose GPUs cannot be used.
class DevicesTest : public ::testing::Test {
 protected:
  static constexpr int kLanes = 3;

  DevicesTest() { config_.lanes = kLanes; }

  Result<Devices> Make(const std::string& device) {
    config_.device = device;
    const DeviceSource source{[this](std::string* why) {
                                if (gpus_ == 0) *why = "no CUDA device was found";
                                return gpus_;
                              },
                              [this](const std::string& name, const BackendOptions& options) {
                                return Open(name, options);
                              }};
    return MakeBackends(config_, logger_, source);
  }

  std::vector<std::string> NamesOf(const std::string& device) {
    const Result<Devices> devices = Make(device);
    if (!devices.ok()) return {devices.status().message()};
    left_out_ = devices->left_out;
    std::vector<std::string> names;
    for (const auto& backend : devices->backends) names.push_back(backend->info().name);
    return names;
  }

  std::string log() {
    logger_.flush();
    return lines_.str();
  }

  Config config_;
  int gpus_ = 3;
  int left_out_ = -1;                         // index in NamesOf
  std::map<std::string, Status> not_opened_;  // by name
  // the first lane for which memory runs out, counted from 1
  std::map<std::string, int> no_lane_;
  std::vector<std::string> opened_;

 private:
  Result<std::unique_ptr<Backend>> Open(const std::string& name, const BackendOptions& options) {
    EXPECT_EQ(options.cpu_threads, config_.cpu_threads);
    opened_.push_back(name);
    if (const auto found = not_opened_.find(name); found != not_opened_.end()) {
      return found->second;
    }
    auto backend = std::make_unique<test::FakeBackend>(
        name, name == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda);
    if (const auto found = no_lane_.find(name); found != no_lane_.end()) {
      backend->FailMakeLane(found->second,
                            ResourceExhausted("making a lane on " + name + ": out of memory"));
    }
    return std::unique_ptr<Backend>(std::move(backend));
  }

  std::ostringstream lines_;
  Logger logger_{{}, std::make_shared<spdlog::sinks::ostream_sink_mt>(lines_)};
};

const char kOld[] = "device cuda:1 (GTX 1080) has compute capability 6.1, this build needs 8.0";

TEST_F(DevicesTest, AutoTakesEveryGpu) {
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cuda:0", "cuda:1", "cuda:2"));
  EXPECT_EQ(left_out_, 0);
  EXPECT_EQ(log(), "");
}

TEST_F(DevicesTest, AutoLeavesOutAGpuThatIsTooOld) {
  not_opened_["cuda:1"] = Unimplemented(kOld);
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cuda:0", "cuda:2"));
  EXPECT_THAT(log(), HasSubstr("device left out"));
  EXPECT_THAT(log(), HasSubstr(kOld));
  EXPECT_THAT(log(), Not(HasSubstr("cuda:0")));
}

TEST_F(DevicesTest, AutoLeavesOutAGpuThatDoesNotOpen) {
  not_opened_["cuda:0"] = Internal("opening cuda:0: uncorrectable ECC error encountered");
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cuda:1", "cuda:2"));
  EXPECT_THAT(log(), HasSubstr("opening cuda:0: uncorrectable ECC error encountered"));
}

TEST_F(DevicesTest, AutoLeavesOutAGpuWithoutMemoryForAllItsLanes) {
  no_lane_["cuda:2"] = kLanes;
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cuda:0", "cuda:1"));
  EXPECT_EQ(left_out_, 1);
  EXPECT_THAT(log(), HasSubstr("making a lane on cuda:2: out of memory"));
}

TEST_F(DevicesTest, AutoTestsOnlyAsManyLanesAsTheEngineCreates) {
  no_lane_["cuda:2"] = kLanes + 1;
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cuda:0", "cuda:1", "cuda:2"));
}

TEST_F(DevicesTest, AutoFallsBackToTheCpuIfNoGpuIsUsable) {
  gpus_ = 2;
  not_opened_["cuda:0"] = Internal("opening cuda:0: no context");
  not_opened_["cuda:1"] = Unimplemented(kOld);
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cpu"));
  EXPECT_EQ(left_out_, 2);
  EXPECT_THAT(log(), HasSubstr("no context"));
  EXPECT_THAT(log(), HasSubstr(kOld));
  EXPECT_THAT(log(), HasSubstr("none of 2 GPUs can be used; serving on the CPU"));
}

TEST_F(DevicesTest, AutoFallsBackToTheCpuWithoutGpus) {
  gpus_ = 0;
  EXPECT_THAT(NamesOf("auto"), ElementsAre("cpu"));
  EXPECT_THAT(opened_, ElementsAre("cpu"));
  EXPECT_EQ(left_out_, 0);
  EXPECT_THAT(log(), HasSubstr("no GPU found: no CUDA device was found; serving on the CPU"));
}

TEST_F(DevicesTest, AutoFailsIfTheCpuCannotBeOpenedEither) {
  gpus_ = 0;
  not_opened_["cpu"] = Internal("no threads");
  EXPECT_THAT(NamesOf("auto"), ElementsAre("no threads"));
}

TEST_F(DevicesTest, AllGpusFailsIfOneIsUnusable) {
  EXPECT_THAT(NamesOf("cuda:all"), ElementsAre("cuda:0", "cuda:1", "cuda:2"));
  not_opened_["cuda:1"] = Unimplemented(kOld);
  const auto backends = Make("cuda:all");
  ASSERT_FALSE(backends.ok());
  EXPECT_EQ(backends.status().code(), Code::kUnimplemented);
  EXPECT_EQ(backends.status().message(),
            std::string(kOld) + " (--device auto leaves such GPUs out)");
  gpus_ = 0;
  EXPECT_THAT(NamesOf("cuda:all"), ElementsAre("device cuda:all: no CUDA device was found"));
}

TEST_F(DevicesTest, NamedDevicesAreOpenedInOrderOrTheStartFails) {
  not_opened_["cuda:1"] = Unimplemented(kOld);
  EXPECT_THAT(NamesOf("cuda:2,cpu,cuda:0"), ElementsAre("cuda:2", "cpu", "cuda:0"));
  const auto backends = Make("cuda:0,cuda:1");
  ASSERT_FALSE(backends.ok());
  EXPECT_EQ(backends.status().code(), Code::kUnimplemented);
  EXPECT_EQ(backends.status().message(), kOld);
  EXPECT_EQ(log(), "");
}

}  // namespace
}  // namespace attend
