// SPDX-License-Identifier: Apache-2.0

#include "server/memory/copy_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/util/thread_name.h"
#include "kernels/util/trace_range.h"

namespace attend {
namespace {

// A part smaller than this costs more to hand over than to copy; a larger one than the other keeps
// a thread from others' copies for long.
constexpr int64_t kPartBytesMin = int64_t{512} << 10;
constexpr int64_t kPartBytesMax = int64_t{4} << 20;

// Pieces above the part size are cut, so that one contiguous tensor is shared out too.
std::vector<HostPiece> Cut(const std::vector<HostPiece>& pieces, int64_t piece_bytes_max) {
  std::vector<HostPiece> cut;
  cut.reserve(pieces.size());
  for (const HostPiece& piece : pieces) {
    for (int64_t at = 0; at < piece.bytes; at += piece_bytes_max) {
      cut.push_back({static_cast<const char*>(piece.from) + at, static_cast<char*>(piece.to) + at,
                     std::min(piece_bytes_max, piece.bytes - at)});
    }
  }
  return cut;
}

}  // namespace

struct CopyPool::Job {
  std::vector<HostPiece> pieces;
  std::vector<size_t> ends;  // of its parts, in `pieces`
  size_t begun = 0;          // parts; with the pool's lock
  std::function<void()> done;
  std::atomic<size_t> parts_left{0};
};

CopyPool::CopyPool(int threads) {
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Run(); });
}

CopyPool::~CopyPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CopyPool::Copy(const std::vector<HostPiece>& pieces, std::function<void()> done) {
  int64_t bytes = 0;
  for (const HostPiece& piece : pieces) bytes += piece.bytes;
  const int64_t threads = static_cast<int64_t>(threads_.size());
  const int64_t part_bytes =
      std::clamp((bytes + threads - 1) / threads, kPartBytesMin, kPartBytesMax);
  auto job = std::make_shared<Job>();
  job->pieces = Cut(pieces, part_bytes);
  job->done = std::move(done);
  int64_t part = 0;
  for (size_t i = 0; i < job->pieces.size(); ++i) {
    part += job->pieces[i].bytes;
    if (part < part_bytes) continue;
    job->ends.push_back(i + 1);
    part = 0;
  }
  if (job->ends.empty() || job->ends.back() < job->pieces.size()) {
    job->ends.push_back(job->pieces.size());
  }
  job->parts_left.store(job->ends.size(), std::memory_order_relaxed);
  const bool one = job->ends.size() == 1;
  // Nothing is allocated under the lock, or once a job is queued.
  std::list<std::shared_ptr<Job>> place = {std::move(job)};
  {
    const std::lock_guard lock(mutex_);
    jobs_.splice(jobs_.end(), place);
  }
  if (one) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
}

void CopyPool::Run() {
  NameThread("attend-copy");
  for (;;) {
    std::list<std::shared_ptr<Job>> place;
    std::shared_ptr<Job> job;
    size_t part = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      place.splice(place.end(), jobs_, jobs_.begin());
      job = place.front();
      part = job->begun++;
      if (job->begun < job->ends.size()) jobs_.splice(jobs_.end(), place);
    }
    {
      const TraceRange range("attend: copy tensors");
      for (size_t i = part == 0 ? 0 : job->ends[part - 1]; i < job->ends[part]; ++i) {
        const HostPiece& piece = job->pieces[i];
        std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
      }
    }
    // The last part's thread sees every other part's bytes: acquire and release on the count.
    if (job->parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1) job->done();
  }
}

}  // namespace attend
