// SPDX-License-Identifier: Apache-2.0
//
// The sizes and times at which the server goes about its work another way: each trades one cost for
// another, and none changes an answer. Some bound what a request may take: how slow its client may
// be, in how many pieces it may come, what its kernel or its check may cost. Elsewhere are limits
// on what a message may say, beside what they limit (wire/, net/); what an operator sets, which is
// an option (app/config.h); and how often a thread looks at something, or how long a stop may take,
// beside that thread. To race another value, change it, rebuild and compare `bench_service --rows
// inline,chunked` in turns with the old one; what was learned goes to tests/bench/TRIED.md.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace attend::thresholds {

// --- A message arrives.

// Messages and chunks up to here are copied on the transport's loop: a hand-over would cost more.
inline constexpr int64_t kOwnThreadBytesMax = int64_t{1} << 20;
// Lengths, slopes and sinks are read on the transport's loop up to here.
inline constexpr int64_t kOwnThreadArrayBytesMax = int64_t{64} << 10;
// Tensors are left where they arrived if they have so many bytes. Fewer are copied, which costs
// about the same; more are moved better by a device's copy engines, from the request's block.
inline constexpr int64_t kGatheredBytesMin = int64_t{16} << 10;
inline constexpr int64_t kGatheredBytesMax = int64_t{64} << 20;
// They are copied as well if they are in more pieces than this and one for so many bytes: each
// piece costs a device's lane more than its bytes do.
inline constexpr int64_t kGatheredPiecesFree = 16;
inline constexpr int64_t kGatheredPieceBytesLeast = 4096;
// Chunks of a stream that may wait for their copy: one is copied while the next one comes in.
inline constexpr int64_t kUnplacedChunksMax = 2;
// An upload must progress by so many bytes per idle timeout, so that single bytes do not keep it
// alive; and by one of so many parts of all its bytes, so that it holds memory for at most as many
// timeouts.
inline constexpr int64_t kUploadProgressBytesMin = int64_t{64} << 10;
inline constexpr int64_t kUploadProgressParts = 16;
// The bytes that have come may be in one range for each of so many bytes of the upload, within
// bounds: every range costs memory, and chunks are compared with them.
inline constexpr int64_t kUploadRangeBytes = 1024;
inline constexpr int64_t kUploadRangesLeast = 64;
inline constexpr int64_t kUploadRangesMost = 16384;
// Enough for the small fields of an ordinary request and of its answer; more comes from the heap.
inline constexpr size_t kRequestArenaBytes = 4096;
inline constexpr size_t kReplyArenaBytes = 2048;

// --- Its tensors are copied.

// A part of a copy that is smaller costs more to hand over than to copy; a larger one keeps a
// thread from others' copies for long.
inline constexpr int64_t kCopyPartBytesMin = int64_t{512} << 10;
inline constexpr int64_t kCopyPartBytesMax = int64_t{4} << 20;
// Ranges of the host's memory up to here are cut from the end of a free range, larger ones from its
// beginning.
inline constexpr int64_t kSmallRangeBytesMax = int64_t{1} << 20;
// Uploads may hold 1 / this of a device's memory, so that on a small one lanes find the rest.
inline constexpr int64_t kStagingDeviceShare = 4;

// --- It waits, or is refused.

// One batch in so many begins with a request of a lower priority that has waited for long
// (schedule/queue_order.h).
inline constexpr int64_t kAgedEvery = 4;
// Requests that come at once are planned together, so many at most: more would fill the queue.
inline constexpr int64_t kPlannedTogetherMost = 128;
// A refused client is told to try again after so long. It is longer the more requests wait or, if
// memory was short, the more of it is used. The last is for a server that drains or has no device.
inline constexpr int64_t kRetryAfterMsMin = 5;
inline constexpr int64_t kRetryAfterMsMax = 1000;
inline constexpr int64_t kRetryAfterMsMemoryMin = 100;
inline constexpr int64_t kRetryAfterMsDraining = 1000;
// How the time that requests take is learned (schedule/estimator.h): how much one batch counts that
// was slower than expected, or faster; how much slower it can count as; how much of a batch is
// taken to be done when it is stopped, one in so many; and how long after a hopeless request was
// tried the next one is: so long, or so many times as long as it takes.
inline constexpr double kSlowerGain = 1.0 / 8;
inline constexpr double kFasterGain = 1.0 / 4;
inline constexpr double kSlowerMost = 4;
inline constexpr double kStoppedHalfway = 2;
inline constexpr std::chrono::milliseconds kTryPauseLeast{100};
inline constexpr int kTryPause = 16;
// Parts in so many that an expected time is taken to be longer than it is expected.
inline constexpr int kExpectedReserve = 4;
// The most that one request may cost by default: what its device computes in this time.
inline constexpr double kRequestSecondsMax = 600;

// --- It runs.

// The CPU threads that are worth one multiprocessor of a GPU, while no rate has been measured.
inline constexpr double kThreadsPerMultiprocessor = 16;
// A small attention on an idle GPU ends within this; what takes longer can afford to be told of.
inline constexpr std::chrono::microseconds kPollAtMost{150};

// --- It is answered.

// Bytes up to here are copied into the slice in front, which costs less than one of their own.
inline constexpr int64_t kReplyCopiedBytesMax = 8192;
// A large answer leaves in up to so many pieces, none smaller than this: each that has left shows
// that its client reads.
inline constexpr int64_t kReplyPiecesMax = 16;
inline constexpr int64_t kReplyPieceBytesMin = int64_t{1} << 20;
// Bytes of data in one chunk to a client. With its fields this is below the 4 MiB that every client
// accepts by default; small enough to be spread over streams, and large enough for the fields not
// to matter.
inline constexpr int64_t kAnswerChunkBytes = int64_t{1} << 20;
// A client that takes so many bytes of its answers, or all of them if they are fewer, has its
// timeout begin again.
inline constexpr int64_t kAnswerBytesPerTimeout = int64_t{1} << 20;

// --- An answer is checked.

// Niceness of the threads that check answers. Where all cores are busy, checks take what serving
// leaves, and some 10 % of a core besides. They also answer at that priority: a client that waits
// for its check waits for the rest too.
inline constexpr int kCheckNiceness = 10;

// Bytes of keys that one check copies from sessions on a device, or a dump copies out of pages.
inline constexpr int64_t kCheckedKeysBytesMax = int64_t{1} << 30;

}  // namespace attend::thresholds
