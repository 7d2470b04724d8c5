// SPDX-License-Identifier: Apache-2.0

#include "server/copy_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/thread_name.h"
#include "kernels/trace_range.h"

namespace attend {
namespace {

// A part smaller than this costs more to hand over than to copy.
constexpr int64_t kPartBytesMin = int64_t{512} << 10;

// Pieces above the part size are cut, so that one contiguous tensor is shared out too.
std::vector<CopyPiece> Cut(const std::vector<CopyPiece>& pieces, int64_t piece_bytes_max) {
  std::vector<CopyPiece> cut;
  cut.reserve(pieces.size());
  for (const CopyPiece& piece : pieces) {
    for (int64_t at = 0; at < piece.bytes; at += piece_bytes_max) {
      cut.push_back({static_cast<const char*>(piece.from) + at, static_cast<char*>(piece.to) + at,
                     std::min(piece_bytes_max, piece.bytes - at)});
    }
  }
  return cut;
}

}  // namespace

struct CopyPool::Job {
  std::vector<CopyPiece> pieces;
  std::function<void()> done;
  std::atomic<int64_t> parts_left{0};
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

void CopyPool::Copy(std::vector<CopyPiece> pieces, std::function<void()> done) {
  int64_t bytes = 0;
  for (const CopyPiece& piece : pieces) bytes += piece.bytes;
  const int64_t threads = static_cast<int64_t>(threads_.size());
  const int64_t part_bytes = std::max(kPartBytesMin, (bytes + threads - 1) / threads);
  auto job = std::make_shared<Job>();
  job->pieces = Cut(pieces, part_bytes);
  job->done = std::move(done);

  std::vector<Part> parts;
  size_t begin = 0;
  int64_t part = 0;
  for (size_t i = 0; i < job->pieces.size(); ++i) {
    part += job->pieces[i].bytes;
    if (part >= part_bytes) {
      parts.push_back({job, begin, i + 1});
      begin = i + 1;
      part = 0;
    }
  }
  if (begin < job->pieces.size() || parts.empty()) {
    parts.push_back({job, begin, job->pieces.size()});
  }
  job->parts_left.store(static_cast<int64_t>(parts.size()), std::memory_order_relaxed);
  const bool one = parts.size() == 1;
  {
    const std::lock_guard lock(mutex_);
    for (Part& each : parts) parts_.push_back(std::move(each));
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
    Part part;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !parts_.empty(); });
      if (parts_.empty()) return;
      part = std::move(parts_.front());
      parts_.pop_front();
    }
    {
      const TraceRange range("attend: copy tensors");
      for (size_t i = part.begin; i < part.end; ++i) {
        const CopyPiece& piece = part.job->pieces[i];
        std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
      }
    }
    // The last part's thread sees every other part's bytes: acquire and release on the count.
    if (part.job->parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1) part.job->done();
  }
}

}  // namespace attend
