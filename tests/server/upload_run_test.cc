// SPDX-License-Identifier: Apache-2.0
//
// Requests that are computed while they arrive, in the engine: what is begun early is right,
// whatever fails and whenever the request is given up it ends once, and no memory goes back while a
// part uses it.

#include "server/upload_run.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/staging_fixture.h"

namespace attend {
namespace {

using testing::FakeBackend;

// A part for each KV head of each sequence, two of rows where there are some.
std::vector<AttentionSlice> HeadByHead(const Attention& a) {
  const Problem& p = a.problem;
  std::vector<AttentionSlice> parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) parts.push_back({b, b + 1, h, h + 1, 0, p.len_q});
  }
  return parts;
}

class UploadRunTest : public StagingTest {
 protected:
  UploadRunTest() { options_.worker.queue_requests_max = 16; }

  void StartRuns() {
    StartStaging();
    for (FakeBackend* device : devices_) device->SetParts(HeadByHead);
  }

  static test::ProblemSpec Heads() { return test::MakeSpec(2, 6, 3, 21, 33, 16, 8); }

  // All bytes of these heads, counted over all sequences.
  static void ArriveHeads(Upload& upload, int64_t begin, int64_t end) {
    const Problem& p = upload.owned->attention.problem;
    const int64_t heads = p.batch * p.heads_kv;
    for (size_t t = 0; t < upload.tensors.size(); ++t) {
      const int64_t head_bytes = upload.tensors[t].bytes / heads;
      char* const to = static_cast<char*>(upload.tensors[t].data) + begin * head_bytes;
      const int64_t bytes = (end - begin) * head_bytes;
      std::memcpy(to, static_cast<const char*>(upload.bytes[t]) + begin * head_bytes,
                  static_cast<size_t>(bytes));
      Came(upload, to, bytes);
    }
  }

  // Counts the parts that ended, by their status.
  struct Parts {
    std::atomic<int> ok{0};
    std::atomic<int> failed{0};
  };
  static std::shared_ptr<Parts> Watch(Upload& upload) {
    auto parts = std::make_shared<Parts>();
    upload.request->upload_run->OnPartEnded(
        [parts](const Request& part) { ++(part.status.ok() ? parts->ok : parts->failed); });
    return parts;
  }
  static void Await(const std::atomic<int>& count, int least) {
    while (count.load() < least) std::this_thread::yield();
  }

  // As whoever brings an upload that comes to nothing.
  static void GiveUp(Upload& upload) {
    std::atomic<bool> quiet{false};
    upload.request->upload_run->Stop([&quiet] { quiet = true; });
    while (!quiet) std::this_thread::yield();
    upload.request.reset();
  }
};

TEST_F(UploadRunTest, HeadsAreComputedBeforeTheLastByte) {
  StartRuns();
  Upload upload = Begin(Heads());
  ASSERT_NE(upload.request->upload_run, nullptr);
  EXPECT_EQ(upload.request->upload_run->parts(), 6);
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  Await(parts->ok, 2);  // the third shares a piece with the fourth
  EXPECT_TRUE(upload.request->upload_run->begun());
  ArriveHeads(upload, 3, 5);
  Await(parts->ok, 4);
  EXPECT_EQ(devices_[0]->submitted_batches(), 4) << "each alone, as it waits for its bytes";
  EXPECT_GE(engine_->staging().parts(), 4);
  ArriveHeads(upload, 5, 6);
  const uint64_t id = upload.id;
  MustSend(upload);
  ExpectRight(upload);
  const Request& ended = collector_.WaitFor(id);
  EXPECT_EQ(parts->ok, 6);
  EXPECT_EQ(ended.device_name, "cuda:0");
  EXPECT_GT(ended.kernel_ns, 0);
  EXPECT_EQ(Ends(StagingEnd::kUsed), 1);
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, AnyOrderOfBytesByManyThreads) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  options_.worker.lanes = 3;
  options_.staging.piece_bytes = static_cast<int64_t>(300 + random_() % 3000);
  StartRuns();
  for (int i = 0; i < 40; ++i) {
    const auto pick = [this](int64_t most) { return static_cast<int64_t>(1 + random_() % most); };
    const int64_t heads = pick(4);
    test::ProblemSpec spec = test::MakeSpec(pick(3), heads * pick(3), heads, pick(30), pick(40),
                                            8 * pick(3), 8 * pick(3));
    Upload upload = Begin(spec);
    if (i % 3 == 0) upload.request->check = true;
    Arrive(upload);
    MustSend(upload);
    ExpectRight(upload);
    const Request& ended = collector_.WaitFor(upload.id);
    if (i % 3 == 0) {
      ASSERT_TRUE(ended.report.has_value());
      EXPECT_TRUE(ended.report->ok) << ended.report->detail;
    }
  }
  EXPECT_GT(engine_->staging().parts(), 0);
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, GivenUpItKeepsItsMemoryUntilItsPartsHaveEnded) {
  StartRuns();
  devices_[0]->Hold();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 5);
  devices_[0]->WaitForWaiting(1);
  std::atomic<bool> quiet{false};
  upload.request->upload_run->Stop([&quiet] { quiet = true; });
  EXPECT_FALSE(quiet) << "a part is at the gate";
  Await(parts->failed, 3);  // those that were queued
  EXPECT_FALSE(quiet);
  devices_[0]->Release();
  while (!quiet) std::this_thread::yield();
  EXPECT_EQ(parts->ok, 1);
  // What comes later begins nothing.
  const int64_t batches = devices_[0]->submitted_batches();
  ArriveHeads(upload, 5, 6);
  EXPECT_EQ(devices_[0]->submitted_batches(), batches);
  upload.request.reset();
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, CancelledAfterTheLastByte) {
  StartRuns();
  devices_[0]->Hold();
  Upload upload = Begin(Heads());
  const std::shared_ptr<UploadRun> run = upload.request->upload_run;
  ArriveHeads(upload, 0, 6);
  devices_[0]->WaitForWaiting(1);
  MustSend(upload);
  EXPECT_EQ(engine_->inflight(), 1);
  run->Cancel(Status(Code::kCancelled, "the client went"));
  EXPECT_FALSE(collector_.Ended(upload.id)) << "a part is at the gate";
  devices_[0]->Release();
  EXPECT_EQ(collector_.WaitFor(upload.id).status.message(), "the client went");
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, PartsThatFindNoRoomAreBegunWithTheLastByte) {
  options_.worker.queue_requests_max = 2;
  StartRuns();
  const uint64_t blocker = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 5);
  EXPECT_EQ(engine_->staging().parts(), 1) << "the queue had room for one";
  devices_[0]->Release();
  for (const uint64_t id : {blocker, queued}) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  Await(parts->ok, 1);
  ArriveHeads(upload, 5, 6);
  MustSend(upload);  // five parts for two places
  ExpectRight(upload);
  EXPECT_EQ(parts->ok, 6);
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, WhereNothingWasBegunItGoesTheOrdinaryWay) {
  StartRuns();
  Upload upload = Begin(Heads());
  for (int n = 1; n <= 6; ++n) devices_[0]->staging().FailMark(n, Internal("no mark"));
  Arrive(upload);
  EXPECT_FALSE(upload.request->upload_run->begun());
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(devices_[0]->submitted_batches(), 1);
  EXPECT_EQ(Ends(StagingEnd::kUsed), 1);
  EXPECT_EQ(engine_->staging().parts(), 0);
  AwaitNothingHeld();
}

// The parts that were begun read the copy, the others the host.
TEST_F(UploadRunTest, ACopyThatFailsLater) {
  StartRuns();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  Await(parts->ok, 2);
  devices_[0]->staging().FailCopy(1, Internal("copying an upload"));
  ArriveHeads(upload, 3, 6);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(parts->ok, 6);
  EXPECT_EQ(engine_->staging().parts(), 2);
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, AFailedPartEndsTheRequestWithItsStatus) {
  StartRuns();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  devices_[0]->FailItem(2, Internal("a kernel failed"));
  ArriveHeads(upload, 0, 4);
  Await(parts->failed, 1);
  ArriveHeads(upload, 4, 6);
  MustSend(upload);
  EXPECT_EQ(collector_.WaitFor(upload.id).status.message(), "a kernel failed");
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, ALostDeviceFailsWhatWasBegun) {
  StartRuns();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  Await(parts->ok, 2);
  devices_[0]->LoseDevice();
  ArriveHeads(upload, 3, 6);
  MustSend(upload);
  EXPECT_EQ(collector_.WaitFor(upload.id).status.code(), Code::kUnavailable);
  AwaitNothingHeld();
}

// With nothing of its own to wait for, a part that is refused is a refusal of the request.
TEST_F(UploadRunTest, RefusedWhereOthersFillTheQueue) {
  options_.worker.queue_requests_max = 2;
  StartRuns();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 2);
  Await(parts->ok, 1);
  const uint64_t blocker = HoldLane();
  const std::vector<uint64_t> queued = {MustSubmit(NewRequest()), MustSubmit(NewRequest())};
  ArriveHeads(upload, 2, 6);
  MustSend(upload);
  EXPECT_EQ(collector_.WaitFor(upload.id).status.code(), Code::kResourceExhausted);
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(blocker).status.ok());
  for (const uint64_t id : queued) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, QueuedPartsOfAnUploadThatIsGivenUpAreDropped) {
  StartRuns();
  const uint64_t blocker = HoldLane();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  engine_->Drain();
  GiveUp(upload);
  EXPECT_EQ(parts->ok, 0);
  EXPECT_EQ(parts->failed, 2);
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(blocker).status.ok());
  AwaitNothingHeld();
}

// Every entry point fails at its N-th call, one at a time: the request ends once, right or with
// that failure, and nothing stays.
TEST_F(UploadRunTest, FaultsAtEveryCall) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  StartRuns();
  FakeBackend& device = *devices_[0];
  const std::vector<std::function<void(int)>> faults = {
      [&](int n) { device.staging().FailCopy(n, Internal("planted")); },
      [&](int n) { device.staging().FailMark(n, Internal("planted")); },
      [&](int n) { device.staging().FailFinish(n, Internal("planted")); },
      [&](int n) { device.FailItem(n, Internal("planted")); },
      [&](int n) { device.FailBatch(n, Internal("planted")); },
      [&](int n) { device.FailSubmit(n, Internal("planted")); }};
  for (size_t fault = 0; fault < faults.size(); ++fault) {
    for (int n = 1; n <= 7; ++n) {
      SCOPED_TRACE("fault " + std::to_string(fault) + " at call " + std::to_string(n));
      Upload upload = Begin(Heads());
      faults[fault](n);
      Arrive(upload);
      MustSend(upload);
      const Request& ended = collector_.WaitFor(upload.id);
      if (ended.status.ok()) {
        ExpectRight(upload);
      } else {
        EXPECT_EQ(ended.status.message(), "planted");
      }
      device.ForgetFaults();
      device.staging().ForgetFaults();
      AwaitNothingHeld();
    }
  }
}

}  // namespace
}  // namespace attend
