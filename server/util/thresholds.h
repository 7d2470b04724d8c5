// SPDX-License-Identifier: Apache-2.0
//
// Sizes and times at which the server switches strategy: each trades one cost for another, and none
// changes an answer. Some bound what a request may take: how slow its client may be, in how many
// pieces it may arrive, what its kernel or check may cost. Not here: limits on the contents of
// messages, which are beside the code that enforces them (wire/, net/); options for operators
// (app/config.h); and polling periods and shutdown times, which are beside their threads. To try
// another value, change it, rebuild, and compare `bench_service --rows inline,chunked` in turns
// with the old one. Results go to tests/bench/TRIED.md.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace attend::thresholds {

// --- A message arrives.

// Messages and chunks up to this size are copied on the transport's loop: a handover would cost
// more.
inline constexpr int64_t kOwnThreadBytesMax = int64_t{1} << 20;
// Lengths, slopes and sinks up to this size are read on the transport's loop.
inline constexpr int64_t kOwnThreadArrayBytesMax = int64_t{64} << 10;
// Tensors of these sizes are left where they arrived. Smaller ones are copied, which costs about
// the same; larger ones are moved faster by a device's copy engines, from the request's block.
inline constexpr int64_t kGatheredBytesMin = int64_t{16} << 10;
inline constexpr int64_t kGatheredBytesMax = int64_t{64} << 20;
// Tensors in more pieces than kGatheredPiecesFree, plus one per kGatheredPieceBytesLeast bytes, are
// copied too: each piece costs a device's lane more than its bytes do.
inline constexpr int64_t kGatheredPiecesFree = 16;
inline constexpr int64_t kGatheredPieceBytesLeast = 4096;
// Chunks of a stream that may wait to be copied: one is copied while the next one arrives.
inline constexpr int64_t kUnplacedChunksMax = 2;
// An upload must progress per idle timeout by at least kUploadProgressBytesMin, so that single
// bytes do not keep it alive; and by 1 / kUploadProgressParts of its size, which bounds how many
// timeouts it can hold memory.
inline constexpr int64_t kUploadProgressBytesMin = int64_t{64} << 10;
inline constexpr int64_t kUploadProgressParts = 16;
// The received bytes may be in one separate range per kUploadRangeBytes of the upload, within the
// two bounds: every range takes memory and is compared with each chunk.
inline constexpr int64_t kUploadRangeBytes = 1024;
inline constexpr int64_t kUploadRangesLeast = 64;
inline constexpr int64_t kUploadRangesMost = 16384;
// Enough for the small fields of an ordinary request and of its response; beyond that the heap is
// used.
inline constexpr size_t kRequestArenaBytes = 4096;
inline constexpr size_t kReplyArenaBytes = 2048;

// --- Its tensors are copied.

// Parts of a copy for the copy threads. A smaller part costs more to hand over than to copy; a
// larger one would delay other copies.
inline constexpr int64_t kCopyPartBytesMin = int64_t{512} << 10;
inline constexpr int64_t kCopyPartBytesMax = int64_t{4} << 20;
// Host memory ranges up to this size are allocated from the end of a free range, larger ones from
// its beginning.
inline constexpr int64_t kSmallRangeBytesMax = int64_t{1} << 20;
// Uploads may hold 1 / this of a device's memory, so that on a small device lanes have enough.
inline constexpr int64_t kStagingDeviceShare = 4;

// --- It waits, or is refused.

// Every kAgedEvery-th batch begins with a request of a lower priority that has waited long enough
// (schedule/queue_order.h).
inline constexpr int64_t kAgedEvery = 4;
// Requests that arrive together are planned together, up to this number: more would fill the queue.
inline constexpr int64_t kPlannedTogetherMost = 128;
// Retry delay for a refused client. It grows with the number of waiting requests or, if memory was
// short, with the memory in use. The last one is for a server that is draining or has no device.
inline constexpr int64_t kRetryAfterMsMin = 5;
inline constexpr int64_t kRetryAfterMsMax = 1000;
inline constexpr int64_t kRetryAfterMsMemoryMin = 100;
inline constexpr int64_t kRetryAfterMsDraining = 1000;
// How request times are learned (schedule/estimator.h): the weight of a batch that was slower or
// faster than expected; the most that it can count as slower; the factor on the time of a stopped
// batch; and the pause between probes of hopeless requests, as a minimum and as a multiple of their
// time.
inline constexpr double kSlowerGain = 1.0 / 8;
inline constexpr double kFasterGain = 1.0 / 4;
inline constexpr double kSlowerMost = 4;
inline constexpr double kStoppedHalfway = 2;
inline constexpr std::chrono::milliseconds kTryPauseLeast{100};
inline constexpr int kTryPause = 16;
// Expected times are padded by 1 / this.
inline constexpr int kExpectedReserve = 4;
// The default maximum cost of a request: what its device computes in this time.
inline constexpr double kRequestSecondsMax = 600;

// --- It runs.

// The CPU threads that equal one multiprocessor of a GPU, while no rate has been measured.
inline constexpr double kThreadsPerMultiprocessor = 16;
// A small attention on an idle GPU ends within this time; longer ones can afford a wake-up.
inline constexpr std::chrono::microseconds kPollAtMost{150};

// --- It is answered.

// Tensors up to this size are copied into the preceding piece, which costs less than a piece of
// their own.
inline constexpr int64_t kReplyCopiedBytesMax = 8192;
// Bytes of data in a chunk to a client. With its fields it is below the 4 MiB that every client
// accepts by default; small enough to be spread over streams, large enough that the fields do not
// matter.
inline constexpr int64_t kAnswerChunkBytes = int64_t{1} << 20;
// A client's timeout restarts when it has taken this many bytes of its answer, or this part of it
// if that is more, or all that waits if that is less.
inline constexpr uint64_t kAnswerBytesPerTimeout = uint64_t{1} << 20;
inline constexpr uint64_t kAnswerPartsPerTimeout = 16;

// --- An answer is checked.

// Niceness of the threads that check answers. On a busy machine, checks get the CPU time that
// serving leaves, plus about 10 % of a core. They also send the answer at that priority: a client
// that waits for its check waits for the rest too.
inline constexpr int kCheckNiceness = 10;

// Bytes of keys that one check, or a dump, copies from session pages on a device.
inline constexpr int64_t kCheckedKeysBytesMax = int64_t{1} << 30;

}  // namespace attend::thresholds
