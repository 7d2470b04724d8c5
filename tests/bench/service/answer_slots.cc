// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/answer_slots.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNoAnswer = 0xff;  // NaN in every format
constexpr int64_t kLookAtEvery = 4;
// Few enough that checking them takes little time beside a request.
constexpr int64_t kPieces = 64;
constexpr int64_t kPieceBytes = 1024;

// Visits pieces of [0, bytes), at other offsets in each turn.
template <class Visit>
void ForPieces(int64_t bytes, int64_t turn, const Visit& visit) {
  const int64_t step = std::max(bytes / kPieces, kPieceBytes);
  for (int64_t begin = 0; begin < bytes; begin += step) {
    const int64_t room = std::max<int64_t>(1, step - kPieceBytes);
    const int64_t at = begin + turn * 7919 * 64 % room;
    visit(at, std::clamp<int64_t>(bytes - at, 0, kPieceBytes));
  }
}

// Runs a thread for each slot; returns the first error.
template <class Run>
Status AllAtOnce(const std::vector<Slot>& slots, const Run& run) {
  std::vector<Status> statuses(slots.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < slots.size(); ++i) {
    threads.emplace_back([&, i] { statuses[i] = run(i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) ATTEND_RETURN_IF_ERROR(status);
  return Status();
}

}  // namespace

AnswerSlots::AnswerSlots(const Work& work, std::vector<Slot> slots, int devices)
    : work_(work), slots_(std::move(slots)), devices_(devices) {}

Status AnswerSlots::Check() {
  const auto bytes = static_cast<size_t>(work_.output_bytes());
  const Status run = AllAtOnce(slots_, [&](size_t i) {
    std::memset(slots_[i].o, kNoAnswer, bytes);
    return slots_[i].run().status();
  });
  if (!run.ok()) return run;
  if (pattern_.empty()) {
    const std::string wrong = work_.CheckOutput(slots_.front().o);
    if (!wrong.empty()) return Internal(wrong);
    pattern_.assign(slots_.front().o, bytes);
  }
  return AllAtOnce(slots_, [&](size_t i) {
    if (std::memcmp(slots_[i].o, pattern_.data(), bytes) == 0) return Status();
    const std::string wrong = work_.CheckOutput(slots_[i].o);
    return wrong.empty() ? Status() : Internal(wrong);
  });
}

Status AnswerSlots::RunOnce(const Slot& slot, int64_t turn, std::set<std::string>* names) const {
  const bool looks = turn % kLookAtEvery == 0;
  if (looks) {
    ForPieces(work_.output_bytes(), turn, [&](int64_t at, int64_t bytes) {
      std::memset(slot.o + at, kNoAnswer, static_cast<size_t>(bytes));
    });
  }
  Result<std::string> name = slot.run();
  if (!name.ok()) return name.status();
  names->insert(*name);
  if (!looks) return Status();
  bool same = true;
  ForPieces(work_.output_bytes(), turn, [&](int64_t at, int64_t bytes) {
    same &= std::memcmp(slot.o + at, pattern_.data() + at, static_cast<size_t>(bytes)) == 0;
  });
  const std::string wrong = same ? "" : work_.CheckOutput(slot.o);
  return wrong.empty() ? Status() : Internal(wrong);
}

Status AnswerSlots::RunUntil(const Slot& slot, Clock::time_point end, int64_t* calls,
                             std::set<std::string>* names) const {
  do {
    ATTEND_RETURN_IF_ERROR(RunOnce(slot, *calls, names));
    ++*calls;
  } while (Clock::now() < end);
  return Status();
}

Result<Sample> AnswerSlots::Drive(double seconds) {
  std::vector<int64_t> calls(slots_.size(), 0);
  std::vector<std::set<std::string>> names(slots_.size());
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  ATTEND_RETURN_IF_ERROR(
      AllAtOnce(slots_, [&](size_t i) { return RunUntil(slots_[i], end, &calls[i], &names[i]); }));
  Sample sample;
  sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const int64_t each : calls) sample.calls += each;
  sample.bytes = sample.calls * (work_.input_bytes() + work_.output_bytes());
  for (size_t i = 1; i < names.size(); ++i) names[0].merge(names[i]);
  if (std::ssize(names[0]) == devices_) return sample;
  return Internal(std::to_string(names[0].size()) + " of " + std::to_string(devices_) +
                  " devices took part, \"" + *names[0].begin() + "\" among them");
}

}  // namespace attend::bench
