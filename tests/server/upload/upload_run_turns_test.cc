// SPDX-License-Identifier: Apache-2.0
//
// Which parts of an upload are tried when, and that they take one place of the queue, whatever
// happens while one is being queued: the test is the queue.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/split/split_parts.h"
#include "server/upload/upload_plan.h"
#include "server/upload/upload_run.h"
#include "tests/server/support/staging_fixture.h"

namespace attend {
namespace {

class UploadTurnsTest : public StagingTest {
 protected:
  static constexpr int64_t kHeads = 4;
  static constexpr int64_t kOpenMax = 2;

  // A run of four heads, each a part, and ready as soon as its own bytes are there: pieces divide
  // the heads of each tensor.
  void SetUp() override {
    options_.staging.piece_bytes = 96;
    StartStaging();
    upload_ = Begin(test::MakeSpec(1, kHeads, kHeads, 21, 33, 16, 8));
    Request& whole = *upload_.request;
    std::vector<AttentionSlice> heads;
    std::vector<QuerySlice> pieces;
    for (int64_t h = 0; h < kHeads; ++h) {
      heads.push_back({0, 1, h, h + 1, 0, 21});
      pieces.push_back({0, 0, 1, h, h + 1, 0, 21});
    }
    Result<std::vector<std::unique_ptr<Request>>> parts =
        MakeParts(whole, pieces, engine_->host_pool());
    ASSERT_TRUE(parts.ok()) << parts.status().ToString();
    for (int64_t h = 0; h < kHeads; ++h) (*parts)[h]->id = static_cast<uint64_t>(h);
    UploadRun::Hooks hooks;
    hooks.push = [this](std::unique_ptr<Request>& part) { return Push(part); };
    hooks.cancel = [](int, uint64_t) {};
    hooks.finish = [](std::unique_ptr<Request>) { FAIL() << "nobody has completed it"; };
    hooks.count_early = [this] { ++early_; };
    whole.source.staged()->run =
        std::make_shared<UploadRun>(whole, PlanUpload(whole.attention, heads, 1), std::move(*parts),
                                    kOpenMax, std::move(hooks));
  }

  void TearDown() override {
    bool idle = false;
    upload_.request->source.run()->Stop([&idle] { idle = true; });
    while (!queued_.empty()) End();
    EXPECT_TRUE(idle);
    upload_.request.reset();
  }

  Status Push(std::unique_ptr<Request>& part) {
    const bool has_slot = part->source.part()->has_slot;
    if (meanwhile_) std::exchange(meanwhile_, nullptr)(part);
    if (full_ && !has_slot) return ResourceExhausted("queue: full");
    pushed_.push_back(PartOf(has_slot));
    if (part != nullptr) queued_.push_back(std::move(part));
    return Status();
  }
  static std::string PartOf(bool has_slot) { return has_slot ? "has_slot" : "first"; }

  // The longest queued part ends.
  void End() {
    ASSERT_FALSE(queued_.empty());
    std::unique_ptr<Request> part = std::move(queued_.front());
    queued_.erase(queued_.begin());
    EndPart(std::move(part));
  }
  static void EndPart(std::unique_ptr<Request> part) {
    Responder* const responder = part->responder;
    responder->Finish(std::move(part));
  }

  Upload upload_;
  bool full_ = false;
  std::function<void(std::unique_ptr<Request>&)> meanwhile_;  // once, while a part is being queued
  std::vector<std::unique_ptr<Request>> queued_;
  std::vector<std::string> pushed_;  // those taken
  int early_ = 0;
};

using Strings = std::vector<std::string>;

TEST_F(UploadTurnsTest, AnotherIsReadyWhileTheFirstIsBeingQueued) {
  meanwhile_ = [this](auto&) {
    ArriveHeads(upload_, 1, 2);
    EXPECT_TRUE(pushed_.empty()) << "there is no saying yet whether the first has a place";
  };
  ArriveHeads(upload_, 0, 1);
  EXPECT_EQ(pushed_, (Strings{"first", "has_slot"}));
  ArriveHeads(upload_, 2, 3);
  EXPECT_EQ(pushed_.size(), static_cast<size_t>(kOpenMax));
  End();
  EXPECT_EQ(pushed_, (Strings{"first", "has_slot", "has_slot"}));
  EXPECT_EQ(early_, 3);
}

TEST_F(UploadTurnsTest, TheFirstEndsBeforeItsThreadKnowsThatItIsQueued) {
  meanwhile_ = [this](std::unique_ptr<Request>& part) {
    ArriveHeads(upload_, 1, 2);
    EndPart(std::move(part));
  };
  ArriveHeads(upload_, 0, 1);
  EXPECT_EQ(pushed_, (Strings{"has_slot", "first"})) << "the second, from within the first";
  EXPECT_EQ(queued_.size(), 1u);
}

TEST_F(UploadTurnsTest, WhatFoundNoPlaceIsTriedAgainOnceAnotherHasOne) {
  full_ = true;
  meanwhile_ = [this](auto&) { ArriveHeads(upload_, 1, 2); };
  ArriveHeads(upload_, 0, 1);
  EXPECT_TRUE(pushed_.empty());
  EXPECT_FALSE(upload_.request->source.run()->begun());
  full_ = false;
  ArriveHeads(upload_, 2, 3);
  EXPECT_EQ(pushed_, (Strings{"first", "has_slot"}));
  End();
  EXPECT_EQ(pushed_, (Strings{"first", "has_slot", "has_slot"}));
}

}  // namespace
}  // namespace attend
