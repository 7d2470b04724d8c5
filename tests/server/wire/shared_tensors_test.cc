// SPDX-License-Identifier: Apache-2.0

#include "server/wire/shared_tensors.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

using Spans = std::vector<std::pair<int64_t, int64_t>>;  // begin and end in the region

class SharedTensorsTest : public ::testing::Test {
 protected:
  SharedTensorsTest() {
    for (int i = 0; i < 2; ++i) {
      auto region = std::make_shared<SharedRegion>();
      region->data = memory_.data() + i * kBytes;
      region->bytes = kBytes;
      regions_.push_back(std::move(region));
    }
  }
  RegionPlace Place(int64_t offset, int64_t bytes, int region = 0) const {
    return {regions_[static_cast<size_t>(region)], offset, bytes};
  }
  // Tensors of both regions, whose memory is adjacent.
  Spans Of(const SpanList& spans) const {
    Spans found;
    for (const HostSpan& span : spans) {
      const int64_t begin = static_cast<const char*>(span.data) - memory_.data();
      found.emplace_back(begin, begin + span.bytes);
    }
    return found;
  }
  Spans Inputs() {
    Request request;
    AddSharedSpans(shared_, request);
    return Of(request.input_spans);
  }

  static constexpr int64_t kBytes = 8192;
  std::vector<char> memory_ = std::vector<char>(2 * kBytes);
  std::vector<RegionRef> regions_;
  SharedTensors shared_;
};

TEST_F(SharedTensorsTest, InputsThatTouchOrOverlapAreOneSpan) {
  shared_.inputs = {Place(1024, 1000), Place(0, 1024), Place(2048, 512), {}};
  EXPECT_EQ(Inputs(), (Spans{{0, 2560}})) << "less than one alignment between them";
  shared_.inputs = {Place(0, 1024), Place(0, 1024), Place(0, 1024), Place(256, 4096)};
  EXPECT_EQ(Inputs(), (Spans{{0, 4352}}));
  shared_.inputs = {Place(0, 4096), Place(256, 256), Place(1024, 1024), {}};
  EXPECT_EQ(Inputs(), (Spans{{0, 4096}})) << "one inside another";
}

TEST_F(SharedTensorsTest, SeparateInputsAreSeparateSpans) {
  shared_.inputs = {Place(4096, 1024), Place(0, 1024), Place(1280, 256), Place(7936, 256)};
  EXPECT_EQ(Inputs(), (Spans{{0, 1024}, {1280, 1536}, {4096, 5120}, {7936, 8192}}));
  // Adjacent in memory, but in different regions.
  shared_.inputs = {Place(kBytes - 256, 256), Place(0, 256, 1), {}, {}};
  EXPECT_EQ(Inputs(), (Spans{{kBytes - 256, kBytes}, {kBytes, kBytes + 256}}));
}

TEST_F(SharedTensorsTest, EmptyTensorsHaveNoSpans) {
  shared_.inputs = {Place(0, 0), Place(512, 256), Place(8192, 0), {}};
  EXPECT_EQ(Inputs(), (Spans{{512, 768}}));
  EXPECT_EQ(shared_.inputs[0].data(), nullptr);
}

TEST_F(SharedTensorsTest, OutputsAreNeverWidened) {
  shared_.outputs = {Place(0, 1000), Place(1024, 64)};
  Request request;
  char block[8];
  request.output_spans = {{block, 0}};
  AddSharedSpans(shared_, request);
  EXPECT_EQ(Of(request.output_spans), (Spans{{0, 1000}, {1024, 1088}}));
  EXPECT_EQ(request.input_spans.size(), 0);
}

}  // namespace
}  // namespace attend
