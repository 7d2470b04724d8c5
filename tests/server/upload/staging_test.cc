// SPDX-License-Identifier: Apache-2.0
//
// Uploads that go on to a device while they arrive: the copy is complete and used, the answer is
// right even if the copy fails, and no memory is freed while a copy may still use it.

#include "server/upload/staging.h"

#include <string>

#include "tests/server/support/staging_fixture.h"

namespace attend {
namespace {

using test::FakeStream;

TEST_F(StagingTest, BytesInAnyOrderReachTheCopyOnce) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  options_.staging.piece_bytes = static_cast<int64_t>(1 + random_() % 9000);
  StartStaging();
  int64_t bytes = 0;
  for (int i = 1; i <= 20; ++i) {
    Upload upload = Begin();
    ASSERT_NE(upload.request->source.copy(), nullptr);
    const HostSpan& last = upload.tensors.back();
    bytes +=
        static_cast<char*>(last.data) + last.bytes - static_cast<char*>(upload.tensors[0].data);
    Arrive(upload);
    MustSend(upload);
    ExpectRight(upload);
    EXPECT_EQ(Ends(StagingEnd::kUsed), i);
    EXPECT_EQ(engine_->staging().copied_bytes(), bytes)
        << "the fake looks for bytes that came twice";
  }
  AwaitNothingHeld();
}

TEST_F(StagingTest, TheKernelReadsTheCopyAndTheCheckReadsTheHost) {
  StartStaging();
  HoldLane();
  Upload upload = Begin();
  Arrive(upload);
  const std::vector<HostSpan> tensors = upload.tensors;
  MustSend(upload);
  AwaitCopies();
  for (const HostSpan& tensor : tensors) {
    std::memset(tensor.data, 0xFF, static_cast<size_t>(tensor.bytes));
  }
  devices_[0]->Release();
  ExpectRight(upload);

  Upload checked = Begin();
  checked.request->check = AnswerCheck::kAsked;
  Arrive(checked);
  MustSend(checked);
  ExpectRight(checked);
  const Request& ended = collector_.WaitFor(checked.id);
  ASSERT_TRUE(ended.report.has_value());
  EXPECT_TRUE(ended.report->ok) << ended.report->detail;
  EXPECT_EQ(Ends(StagingEnd::kUsed), 2);
  AwaitNothingHeld();
}

TEST_F(StagingTest, TheKernelWaitsForTheLastCopy) {
  StartStaging();
  devices_[0]->staging().Hold();
  Upload upload = Begin();
  Arrive(upload);
  MustSend(upload);
  devices_[0]->WaitForBatches(1);
  EXPECT_FALSE(collector_.Ended(upload.id)) << "the fake's lane waits for the event";
  devices_[0]->staging().Release();
  ExpectRight(upload);
  AwaitNothingHeld();
}

TEST_F(StagingTest, SmallUploadsAreNotStaged) {
  options_.staging.bytes_min = int64_t{1} << 20;
  StartStaging();
  Upload small = Begin();
  EXPECT_EQ(small.request->source.copy(), nullptr);
  EXPECT_NE(small.request->input.data(), nullptr);
  Arrive(small);
  MustSend(small);
  ExpectRight(small);
  for (int end = 0; end < kStagingEndCount; ++end) EXPECT_EQ(Ends(static_cast<StagingEnd>(end)), 0);
  EXPECT_EQ(devices_[0]->staging().counts().makes, 0);
  AwaitNothingHeld();
}

TEST_F(StagingTest, StagingCanBeDisabled) {
  options_.staging.bytes_max = 0;
  StartStaging();
  Upload upload = Begin();
  EXPECT_EQ(upload.request->source.copy(), nullptr);
  Arrive(upload);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(Ends(StagingEnd::kBudget), 0) << "none was wanted";
}

TEST_F(StagingTest, ADeviceThatUsesHostMemoryNeedsNoStaging) {
  Start();
  Upload upload = Begin();
  EXPECT_EQ(upload.request->source.copy(), nullptr);
  EXPECT_EQ(engine_->staging().limit(0).bytes_max, 0);
  Arrive(upload);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(Ends(StagingEnd::kBudget), 0);
}

TEST_F(StagingTest, TheStagingBudgetIsReturned) {
  options_.staging.bytes_max = 20'000;  // of one upload
  StartStaging();
  Upload first = Begin();
  ASSERT_NE(first.request->source.copy(), nullptr);
  EXPECT_LE(engine_->staging().held_bytes(0), 20'000);
  Upload second = Begin();
  EXPECT_EQ(second.request->source.copy(), nullptr);
  EXPECT_EQ(Ends(StagingEnd::kBudget), 1);
  for (Upload* each : {&first, &second}) {
    Arrive(*each);
    MustSend(*each);
    ExpectRight(*each);
  }
  AwaitNothingHeld();
  Upload third = Begin();
  EXPECT_NE(third.request->source.copy(), nullptr);
  third.request.reset();
  EXPECT_EQ(Ends(StagingEnd::kAborted), 1);
  AwaitNothingHeld();
}

TEST_F(StagingTest, AFailureOfAnyDeviceCallLeavesTheAnswerRight) {
  StartStaging();
  FakeStream& stream = devices_[0]->staging();
  const Status fault = ResourceExhausted("cudaErrorPretend");
  const auto run = [&](StagingEnd end) {
    const int64_t before = Ends(end);
    Upload upload = Begin();
    Arrive(upload);
    MustSend(upload);
    ExpectRight(upload);
    EXPECT_EQ(Ends(end), before + 1);
    AwaitNothingHeld();
    stream.ForgetFaults();
  };
  const int64_t copies_before = stream.counts().copies;
  run(StagingEnd::kUsed);
  const int64_t copies = stream.counts().copies - copies_before;
  EXPECT_GT(copies, 3);
  stream.FailMake(1, fault);
  run(StagingEnd::kNoMemory);
  stream.FailFinish(1, fault);
  run(StagingEnd::kCopyFailed);
  // Their number varies with the order; the first third occurs in every order.
  for (int n = 1; n <= copies / 3; ++n) {
    SCOPED_TRACE("copy " + std::to_string(n));
    stream.FailCopy(n, fault);
    run(StagingEnd::kCopyFailed);
  }
  run(StagingEnd::kUsed);
}

TEST_F(StagingTest, TheCopysDeviceIsLostAfterTheUpload) {
  StartStaging(2);
  Upload upload = Begin();
  ASSERT_NE(upload.request->source.copy(), nullptr);
  ASSERT_EQ(upload.request->source.copy()->device(), 0);
  Arrive(upload, 0.5);
  devices_[0]->LoseDevice();
  const uint64_t victim = MustSubmit(NewRequest());  // to the first device, as all are idle
  EXPECT_EQ(collector_.WaitFor(victim).status.code(), Code::kUnavailable);
  Upload again = Begin();
  ASSERT_NE(again.request->source.copy(), nullptr);
  EXPECT_EQ(again.request->source.copy()->device(), 1);
  upload.request.reset();  // half of it; another client sends it again
  Arrive(again);
  MustSend(again);
  ExpectRight(again);
  EXPECT_EQ(Ends(StagingEnd::kUsed), 1);
  AwaitNothingHeld();
}

TEST_F(StagingTest, TheCopysDeviceIsLostBeforeTheEnd) {
  StartStaging(2);
  Upload upload = Begin();
  ASSERT_EQ(upload.request->source.copy()->device(), 0);
  Arrive(upload);
  devices_[0]->LoseDevice();
  const uint64_t victim = MustSubmit(NewRequest());
  EXPECT_EQ(collector_.WaitFor(victim).status.code(), Code::kUnavailable);
  MustSend(upload);
  ExpectRight(upload);
  EXPECT_EQ(collector_.WaitFor(upload.id).device, 1);
  EXPECT_EQ(Ends(StagingEnd::kDeviceLost), 1);
  AwaitNothingHeld();
}

TEST_F(StagingTest, TheCopysDeviceIsPreferredUnlessItsQueueIsFull) {
  options_.worker.queue_requests_max = 1;
  StartStaging(2);
  Upload first = Begin();
  Upload second = Begin();
  Upload third = Begin();
  ASSERT_EQ(first.request->source.copy()->device(), 0);
  ASSERT_EQ(second.request->source.copy()->device(), 1) << "a load is expected of the first";
  ASSERT_EQ(third.request->source.copy()->device(), 0);
  devices_[0]->Hold();
  for (Upload* each : {&first, &second, &third}) Arrive(*each);
  MustSend(first);
  devices_[0]->WaitForWaiting(1);
  MustSend(third);  // waits, though the second device is idle
  EXPECT_EQ(engine_->Devices()[1].outstanding_batches, 0);
  Upload fourth = Begin();
  ASSERT_EQ(fourth.request->source.copy()->device(), 1);
  second.request->source.copy()->Drop(StagingEnd::kCopyFailed);
  EXPECT_EQ(second.request->source.copy()->device(), -1);
  Arrive(fourth);
  devices_[1]->Hold();
  MustSend(fourth);
  devices_[1]->WaitForWaiting(1);
  MustSend(second);  // to the second device's queue, which is full now
  Upload fifth = Begin();
  Arrive(fifth);
  EXPECT_EQ(engine_->Submit(fifth.request).code(), Code::kResourceExhausted);
  EXPECT_EQ(Ends(StagingEnd::kQueueFull), 1);
  fifth.request.reset();
  for (auto* device : devices_) device->Release();
  for (Upload* each : {&first, &second, &third, &fourth}) ExpectRight(*each);
  AwaitNothingHeld();
}

// Copies that the device has not done yet keep block and budget, whatever happens to the request.
TEST_F(StagingTest, NoMemoryIsFreedUnderACopy) {
  StartStaging();
  FakeStream& stream = devices_[0]->staging();
  for (const double share : {0.0, 0.4, 1.0}) {
    SCOPED_TRACE(std::to_string(share) + " of the bytes");
    stream.Hold();
    Upload upload = Begin();
    Arrive(upload, share);
    const int64_t held = engine_->staging().held_bytes(0);
    EXPECT_GT(held, 0);
    const int64_t used = engine_->host_pool().used_bytes();
    upload.request->output.Release();
    const int64_t output = used - engine_->host_pool().used_bytes();
    upload.request.reset();  // does not wait
    EXPECT_EQ(engine_->host_pool().used_bytes(), used - output) << "the block is still read";
    EXPECT_EQ(engine_->staging().held_bytes(0), held);
    stream.Release();
    AwaitNothingHeld();
  }
  EXPECT_EQ(Ends(StagingEnd::kAborted), 3);
}

TEST_F(StagingTest, ADroppedCopyLeavesTheBlockToItsRequest) {
  StartStaging();
  devices_[0]->staging().Hold();
  Upload upload = Begin();
  Arrive(upload);
  devices_[0]->staging().FailFinish(1, Internal("recording the end of an upload"));
  MustSend(upload);
  ExpectRight(upload);  // the copies are still held back
  EXPECT_EQ(Ends(StagingEnd::kCopyFailed), 1);
  EXPECT_GT(engine_->host_pool().used_bytes(), 0);
  devices_[0]->staging().Release();
  AwaitNothingHeld();
}

TEST_F(StagingTest, ACancellationInTheQueueWaitsForCopies) {
  StartStaging();
  const uint64_t running = HoldLane();
  devices_[0]->staging().Hold();
  Upload upload = Begin();
  Arrive(upload);
  MustSend(upload);
  engine_->Cancel(upload.id);
  EXPECT_EQ(collector_.WaitFor(upload.id).status.code(), Code::kCancelled);
  EXPECT_GT(engine_->staging().held_bytes(0), 0);
  EXPECT_GT(engine_->host_pool().used_bytes(), 0);
  devices_[0]->Release();
  collector_.WaitFor(running);
  devices_[0]->staging().Release();
  AwaitNothingHeld();
  EXPECT_EQ(Ends(StagingEnd::kAborted), 1);
}

TEST_F(StagingTest, TheEngineWaitsForCopiesBeforeFreeingMemory) {
  StartStaging();
  devices_[0]->staging().Hold();
  Upload upload = Begin();
  Arrive(upload, 0.7);
  upload.request.reset();
  std::thread release([&] { devices_[0]->staging().Release(); });
  // AddressSanitizer and the pool's own count see a block that is returned too late
  engine_.reset();
  release.join();
  devices_.clear();
}

}  // namespace
}  // namespace attend
