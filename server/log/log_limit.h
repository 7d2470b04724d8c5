// SPDX-License-Identifier: Apache-2.0
//
// Limits the log lines of each kind to a rate, after a burst. Suppressed lines are counted, and
// reported with the kind's next line or once it is quiet again. Pure, with time as an argument; not
// thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"

namespace attend {

class LogLimit {
 public:
  // The burst of a kind, in seconds of its rate.
  static constexpr double kBurstSeconds = 20;
  // Kinds beyond this number share one.
  static constexpr size_t kKindsMax = 256;

  // Lines of a kind suppressed since its last written line.
  struct LeftOut {
    std::string event;
    std::string kind;
    int64_t lines = 0;
    Duration over{};  // since the first of them
  };
  struct Verdict {
    bool write = true;
    LeftOut before;  // to be reported first, if `lines` is not 0
  };

  // `rate`: lines per second of each kind; 0: no limit.
  explicit LogLimit(double rate) : rate_(rate) {}

  // Whether to write a line. Lines with the same event and `kind` are one kind.
  Verdict Take(std::string_view event, std::string_view kind, TimePoint now);

  // The suppressed lines of kinds that may write again but have not, or of every kind (`all`).
  // Resets their counts.
  std::vector<LeftOut> TakeLeftOut(TimePoint now, bool all);

 private:
  struct Bucket {
    double lines = 0;  // that may be written now
    TimePoint filled{};
    int64_t left_out = 0;
    TimePoint first_left_out{};
  };
  using Name = std::pair<std::string, std::string>;
  struct Before {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const {
      using View = std::pair<std::string_view, std::string_view>;
      return View(a.first, a.second) < View(b.first, b.second);
    }
  };
  using Buckets = std::map<Name, Bucket, Before>;

  Buckets::iterator Find(std::string_view event, std::string_view kind, TimePoint now);
  void Fill(Bucket& bucket, TimePoint now) const;
  static LeftOut Forget(Buckets::value_type& entry, TimePoint now);

  const double rate_;
  Buckets buckets_;
};

}  // namespace attend
