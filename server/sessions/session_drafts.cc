// SPDX-License-Identifier: Apache-2.0
//
// A draft of which some tokens stay: a truncation after which these tokens follow, in pages of
// their own (session_cuts.cc). Its rows are read where other sessions or requests may share them,
// and are only written to fresh pages.

#include <algorithm>
#include <functional>
#include <new>
#include <string>
#include <string_view>

#include "kernels/contract/limits.h"
#include "kernels/contract/tree.h"
#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {
namespace {

std::string KeptName(size_t n) { return "kept[" + std::to_string(n) + "]"; }

Status CheckKept(std::span<const int64_t> kept) {
  if (std::ssize(kept) > kTreeTokensMax) {
    return InvalidArgument("kept has " + std::to_string(kept.size()) +
                           " entries, must have at most " + std::to_string(kTreeTokensMax));
  }
  for (size_t n = 0; n < kept.size(); ++n) {
    const int64_t low = n == 0 ? 0 : kept[n - 1] + 1;
    if (kept[n] >= low && kept[n] < kTreeTokensMax) continue;
    return InvalidArgument(OutOfBounds(KeptName(n), kept[n], low, kTreeTokensMax - 1) +
                           ": ascending, of at most " + std::to_string(kTreeTokensMax) + " tokens");
  }
  return Status();
}

// Tells calls with different arguments apart; never 0.
uint64_t DigestOf(int64_t length, std::span<const int64_t> kept) {
  const std::string_view bytes(reinterpret_cast<const char*>(kept.data()), kept.size_bytes());
  return (std::hash<std::string_view>{}(bytes)*31 + std::hash<int64_t>{}(length)) | 1;
}

}  // namespace

Result<SessionInfo> SessionTable::KeepDraft(int tenant, const std::string& id, int64_t length,
                                            std::span<const int64_t> kept, CacheRefusal* refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  ATTEND_RETURN_IF_ERROR(CheckKept(kept));
  if (length < 0 || length > kLengthMax) {
    return Status(Code::kOutOfRange, OutOfBounds("length", length, 0, kLengthMax));
  }
  Cut cut;
  cut.draft_begin = length;
  cut.draft = DigestOf(length, kept);
  // Tokens that stay in their place.
  size_t first = 0;
  while (first < kept.size() && kept[first] == static_cast<int64_t>(first)) ++first;
  cut.length = length + static_cast<int64_t>(first);
  try {
    for (const int64_t token : kept.subspan(first)) cut.moved.push_back(length + token);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
  return Shorten(tenant, id, cut, refusal);
}

Status SessionTable::CheckDraft(const Session& session, Cut& cut) const {
  const int64_t whole = session.length();
  if (session.longest() > whole) {
    return Status(Code::kFailedPrecondition,
                  "the session's layers have " + std::to_string(whole) + " to " +
                      std::to_string(session.longest()) +
                      " tokens, must have the same draft: append to all, or truncate");
  }
  // The moved tokens lie beyond the end that they produced: the call is a retry.
  if (!cut.moved.empty() && session.draft == cut.draft && whole == cut.end()) {
    cut.length = whole;
    cut.moved.clear();
    return Status();
  }
  const int64_t last = cut.moved.empty() ? cut.length - 1 : cut.moved.back();
  const bool evicted = std::any_of(session.layers.begin(), session.layers.end(),
                                   [](const Layer& layer) { return layer.evicted_from >= 0; });
  if (evicted && std::max(cut.draft_begin, last + 1) > whole) {
    return Status(Code::kOutOfRange, "kept and length ask for " +
                                         std::to_string(std::max(cut.draft_begin, last + 1)) +
                                         " tokens, the session has " + std::to_string(whole) +
                                         ": the others were evicted; append them again");
  }
  const int64_t least = std::max<int64_t>(0, whole - kTreeTokensMax);
  if (cut.draft_begin < least || cut.draft_begin > whole) {
    return Status(Code::kOutOfRange, OutOfBounds("length", cut.draft_begin, least, whole) +
                                         ": a draft has at most " + std::to_string(kTreeTokensMax) +
                                         " tokens");
  }
  if (last < whole) return Status();
  return Status(Code::kOutOfRange, "kept has " + std::to_string(last - cut.draft_begin) +
                                       ", the draft after length " +
                                       std::to_string(cut.draft_begin) + " has " +
                                       std::to_string(whole - cut.draft_begin) + " tokens");
}

}  // namespace attend
