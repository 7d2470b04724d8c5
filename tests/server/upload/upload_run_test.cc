// SPDX-License-Identifier: Apache-2.0
//
// Requests that are computed while they arrive, in the engine: what is begun early is right,
// whatever fails and whenever the request is given up it ends once, and no memory goes back while a
// part uses it.

#include "server/upload/upload_run.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "tests/server/support/staging_fixture.h"

namespace attend {
namespace {

using test::FakeBackend;

// As a device would compute it: each KV head of each sequence for itself, in two parts of rows
// where there are some. Those of one head are one part of the upload.
std::vector<AttentionSlice> HeadByHead(const Attention& a) {
  const Problem& p = a.problem;
  std::vector<AttentionSlice> parts;
  if (p.batch * p.heads_kv < 2) return parts;  // small, as others' requests are
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      const int64_t half = RowsCanBeSliced(a) ? p.len_q / 2 : 0;
      if (half > 0) parts.push_back({b, b + 1, h, h + 1, 0, half});
      parts.push_back({b, b + 1, h, h + 1, half, p.len_q});
    }
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

  // Counts the parts that ended, by their status.
  struct Parts {
    std::atomic<int> ok{0};
    std::atomic<int> failed{0};
  };
  static std::shared_ptr<Parts> Watch(Upload& upload) {
    auto parts = std::make_shared<Parts>();
    upload.request->source.run()->OnPartEnded(
        [parts](const Request& part) { ++(part.status.ok() ? parts->ok : parts->failed); });
    return parts;
  }
  static void Await(const std::atomic<int>& count, int least) {
    while (count.load() < least) std::this_thread::yield();
  }

  // A blocker holds the only lane, and others take both places of the queue. Their ids.
  std::vector<uint64_t> FillQueue() {
    return {HoldLane(), MustSubmit(NewRequest()), MustSubmit(NewRequest())};
  }
  void ExpectServed(const std::vector<uint64_t>& others) {
    for (const uint64_t id : others) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  }

  // Four parts are ready, no more of them open than there are lanes; the others run when it is
  // their turn, before the last byte.
  void ExpectTurns(int lanes) {
    options_.worker.lanes = lanes;
    StartRuns();
    FakeBackend& device = *devices_[0];
    device.Hold();
    Upload upload = Begin(Heads());
    const auto parts = Watch(upload);
    ArriveHeads(upload, 0, 5);
    // Of several lanes one is left to small requests.
    const int64_t running = std::max(1, lanes - 1);
    device.WaitForWaiting(running);
    EXPECT_EQ(device.submitted_batches(), running);
    EXPECT_EQ(engine_->Devices()[0].queued, lanes - running);
    device.ReleaseOne();
    device.WaitForBatches(running + 1);
    Await(parts->ok, 1);
    EXPECT_EQ(device.submitted_batches(), running + 1) << "one ended, one began";
    device.Release();
    Await(parts->ok, 4);
    EXPECT_EQ(device.submitted_batches(), 4);
    ArriveHeads(upload, 5, 6);
    MustSend(upload);
    ExpectRight(upload);
    EXPECT_EQ(parts->ok, 6);
    AwaitNothingHeld();
    EXPECT_EQ(device.submitted_batches(), 6);
    EXPECT_EQ(engine_->staging().parts(), 4);
  }

  // As whoever brings an upload that comes to nothing.
  static void GiveUp(Upload& upload) {
    std::atomic<bool> idle{false};
    upload.request->source.run()->Stop([&idle] { idle = true; });
    while (!idle) std::this_thread::yield();
    upload.request.reset();
  }
};

TEST_F(UploadRunTest, HeadsAreComputedBeforeTheLastByte) {
  StartRuns();
  Upload upload = Begin(Heads());
  ASSERT_NE(upload.request->source.run(), nullptr);
  EXPECT_EQ(upload.request->source.run()->parts(), 6);
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  Await(parts->ok, 2);  // the third shares a piece with the fourth
  EXPECT_TRUE(upload.request->source.run()->begun());
  ArriveHeads(upload, 3, 5);
  Await(parts->ok, 4);
  EXPECT_EQ(devices_[0]->submitted_batches(), 4) << "each alone, as it waits for its bytes";
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
  EXPECT_EQ(engine_->staging().parts(), 4) << "the last two were complete with the last byte";
}

TEST_F(UploadRunTest, AsManyAreOpenAsThereAreLanes) { ExpectTurns(1); }

TEST_F(UploadRunTest, AsManyAreOpenAsThereAreThreeLanes) { ExpectTurns(3); }

TEST_F(UploadRunTest, AnyOrderOfBytesByManyThreads) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  options_.worker.lanes = 3;
  if (random_() % 2 == 0) options_.worker.batcher.batch_flops_max = 1e-12;  // costs beyond bounds
  options_.staging.piece_bytes = static_cast<int64_t>(300 + random_() % 3000);
  StartRuns();
  for (int i = 0; i < 40; ++i) {
    const auto pick = [this](int64_t most) { return static_cast<int64_t>(1 + random_() % most); };
    const int64_t heads = pick(4);
    test::ProblemSpec spec = test::MakeSpec(pick(3), heads * pick(3), heads, pick(30), pick(40),
                                            8 * pick(3), 8 * pick(3));
    Upload upload = Begin(spec);
    if (i % 3 == 0) upload.request->check = AnswerCheck::kAsked;
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
  options_.worker.lanes = 2;
  StartRuns();
  const uint64_t blocker = HoldLane();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 5);
  devices_[0]->WaitForWaiting(2);  // the blocker and one part; one is queued, two are ready
  std::atomic<bool> idle{false};
  upload.request->source.run()->Stop([&idle] { idle = true; });
  EXPECT_FALSE(idle) << "a part is at the gate";
  Await(parts->failed, 1);  // what was queued
  EXPECT_FALSE(idle);
  devices_[0]->Release();
  while (!idle) std::this_thread::yield();
  EXPECT_EQ(parts->ok, 1);
  EXPECT_TRUE(collector_.WaitFor(blocker).status.ok());
  // What comes later begins nothing, nor does what was ready.
  ArriveHeads(upload, 5, 6);
  EXPECT_EQ(devices_[0]->submitted_batches(), 2);
  EXPECT_EQ(parts->failed, 1);
  upload.request.reset();
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, CancelledAfterTheLastByte) {
  StartRuns();
  devices_[0]->Hold();
  Upload upload = Begin(Heads());
  const std::shared_ptr<UploadRun> run = upload.request->source.staged()->run;
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

// Of four that are ready two are queued. The others' turns come when those end.
TEST_F(UploadRunTest, PartsThatWaitForTheirTurnAreBegunWhenAnotherEnds) {
  options_.worker.lanes = 2;
  options_.worker.queue_requests_max = 2;
  StartRuns();
  devices_[0]->Hold();
  std::vector<uint64_t> others = {MustSubmit(NewRequest()), MustSubmit(NewRequest())};
  devices_[0]->WaitForWaiting(2);
  others.push_back(MustSubmit(NewRequest()));
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 5);
  EXPECT_EQ(engine_->staging().parts(), 2) << "the queue had room for one, which is all it takes";
  EXPECT_EQ(engine_->Devices()[0].queued, 3);
  devices_[0]->Release();
  Await(parts->ok, 4);
  ExpectServed(others);
  ArriveHeads(upload, 5, 6);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(parts->ok, 6);
  AwaitNothingHeld();
  EXPECT_EQ(engine_->staging().parts(), 4);
}

// None of them ends while bytes are missing, as none has found room.
TEST_F(UploadRunTest, PartsThatFoundNoRoomAreBegunWithTheLastByte) {
  options_.worker.queue_requests_max = 2;
  StartRuns();
  const std::vector<uint64_t> others = FillQueue();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 5);
  EXPECT_FALSE(upload.request->source.run()->begun());
  devices_[0]->Release();
  ExpectServed(others);
  EXPECT_FALSE(upload.request->source.run()->begun());
  ArriveHeads(upload, 5, 6);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(parts->ok, 6);
  AwaitNothingHeld();
  EXPECT_EQ(engine_->staging().parts(), 0);
}

TEST_F(UploadRunTest, WhereNothingWasBegunItGoesTheOrdinaryWay) {
  StartRuns();
  Upload upload = Begin(Heads());
  for (int n = 1; n <= 6; ++n) devices_[0]->staging().FailMark(n, Internal("no mark"));
  Arrive(upload);
  EXPECT_FALSE(upload.request->source.run()->begun());
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
  AwaitNothingHeld();
  EXPECT_EQ(engine_->staging().parts(), 2) << "when the others began nothing was missing";
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
  EXPECT_EQ(parts->ok, 1);
  EXPECT_EQ(devices_[0]->submitted_batches(), 2) << "what waited was begun";
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

TEST_F(UploadRunTest, FurtherPartsNeedNoPlaceInAFullQueue) {
  options_.worker.queue_requests_max = 2;
  StartRuns();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 2);
  Await(parts->ok, 1);
  const std::vector<uint64_t> others = FillQueue();
  ArriveHeads(upload, 2, 6);
  MustSend(upload);
  EXPECT_EQ(engine_->Devices()[0].queued, 2 + 5);
  EXPECT_EQ(Submit(NewRequest()).code(), Code::kResourceExhausted) << "nor do they make any";
  devices_[0]->Release();
  ExpectRight(upload);
  ExpectServed(others);
  AwaitNothingHeld();
}

TEST_F(UploadRunTest, AQueuedPartOfAnUploadThatIsGivenUpIsDropped) {
  StartRuns();
  const uint64_t blocker = HoldLane();
  Upload upload = Begin(Heads());
  const auto parts = Watch(upload);
  ArriveHeads(upload, 0, 3);
  engine_->Drain();
  GiveUp(upload);
  EXPECT_EQ(parts->ok, 0);
  EXPECT_EQ(parts->failed, 1) << "the other one waited for its turn";
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(blocker).status.ok());
  AwaitNothingHeld();
  EXPECT_EQ(devices_[0]->submitted_batches(), 1);
}

// Every entry point fails at its N-th call, one at a time, and nothing stays. Without the device's
// copy, or what says how far it is, the request is right all the same; that a part cannot be
// computed is its end.
TEST_F(UploadRunTest, FaultsAtEveryCall) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  StartRuns();
  FakeBackend& device = *devices_[0];
  constexpr int kParts = 6;
  struct Fault {
    std::function<void(int)> plant;
    bool ends;  // the request
  };
  const std::vector<Fault> faults = {
      {[&](int n) { device.staging().FailCopy(n, Internal("planted")); }, false},
      {[&](int n) { device.staging().FailMark(n, Internal("planted")); }, false},
      {[&](int n) { device.staging().FailFinish(n, Internal("planted")); }, false},
      {[&](int n) { device.FailItem(n, Internal("planted")); }, true},
      {[&](int n) { device.FailBatch(n, Internal("planted")); }, true},
      {[&](int n) { device.FailSubmit(n, Internal("planted")); }, true}};
  for (size_t fault = 0; fault < faults.size(); ++fault) {
    for (int n = 1; n <= kParts + 1; ++n) {
      SCOPED_TRACE("fault " + std::to_string(fault) + " at call " + std::to_string(n));
      Upload upload = Begin(Heads());
      faults[fault].plant(n);
      Arrive(upload);
      MustSend(upload);
      if (faults[fault].ends && n <= kParts) {
        EXPECT_EQ(collector_.WaitFor(upload.id).status.message(), "planted");
      } else {
        ExpectRight(upload);
      }
      device.ForgetFaults();
      device.staging().ForgetFaults();
      AwaitNothingHeld();
    }
  }
}

}  // namespace
}  // namespace attend
