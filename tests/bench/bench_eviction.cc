// SPDX-License-Identifier: Apache-2.0
//
// The time for which the session table is locked to evict pages that a tenant's sessions share. A
// session holds its tenant's own part of the memory and all common memory, further sessions are
// forks of it, and another tenant, which has a part of its own, asks for pages. Every result is
// checked; a wrong one prints no time.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/util/clock.h"
#include "server/sessions/session_table.h"
#include "tests/server/support/test_arena.h"

namespace attend::bench {
namespace {

using Timer = std::chrono::steady_clock;

struct Case {
  int64_t pages;   // per layer of the session that fills the memory
  int64_t layers;  // per session
  int64_t forks;
  bool alike;       // each fork has all pages; otherwise each has one page less than the last
  int64_t evicted;  // pages per request
  int64_t own = 0;  // pages per layer that each fork, which is forked itself, appends
};

// The smallest pages, as their size does not matter.
constexpr int64_t kRows = 1;
constexpr LayerShape kShape{DType::kFloat16, 16, 16, 16};
constexpr int kFull = 0, kNeedy = 1;

void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
void Require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("wrong: ") + what);
}
template <class T>
T Require(Result<T> result) {
  Require(result.status());
  return *std::move(result);
}

class FullTable {
 public:
  FullTable(const Case& c, int rounds)
      : page_bytes_(LayoutOf(kShape, kRows).page_bytes),
        all_((PagesOf(c) + 2) / 3 * 4),
        arena_(all_ * page_bytes_ + kPageUnitBytes),
        pages_(static_cast<size_t>(all_)) {
    Require(c.evicted * rounds <= all_ / 2, "enough pages are common");
    SessionOptions options{.tenant_weights = {1, 1}};
    options.page_rows = kRows;
    options.slab_bytes = page_bytes_;
    options.sessions_max = 4 * c.forks + 8;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}});
    trunk_ = Create(kFull, c.layers);
    for (int64_t layer = 0; layer < c.layers; ++layer) Append(kFull, trunk_, layer, 0, c.pages);
    for (int64_t n = 0; n < c.forks; ++n) {
      const int64_t length = c.alike ? c.pages : c.pages - 1 - n;
      const std::string fork = Require(table_->Fork(kFull, trunk_, length)).id;
      if (c.own == 0) continue;
      for (int64_t layer = 0; layer < c.layers; ++layer) Append(kFull, fork, layer, length, c.own);
      Require(table_->Fork(kFull, fork, length + c.own));
    }
    needy_ = Create(kNeedy, 1, /*pinned=*/true);
    taken_ = all_ - PagesOf(c);
    Append(kNeedy, needy_, 0, 0, taken_);
    Require(UsedPages() == all_, "the memory is full");
  }

  // Seconds until the needy tenant has `pages` more pages.
  double Take(int64_t pages) {
    const int64_t used = UsedPages();
    const double seconds = Append(kNeedy, needy_, 0, taken_, pages);
    taken_ += pages;
    Require(table_->tenant_bytes(0)[kNeedy] == taken_ * page_bytes_,
            "the requesting tenant has its pages");
    Require(UsedPages() <= used, "no page is used twice");
    return seconds;
  }
  // Checks every page of every session.
  void Check() const { Require(table_->Consistent(), "the table is consistent"); }

 private:
  static int64_t PagesOf(const Case& c) { return (c.pages + c.forks * c.own) * c.layers; }
  int64_t UsedPages() const { return table_->memory(0).used_bytes / page_bytes_; }

  std::string Create(int tenant, int64_t layers, bool pinned = false) {
    const std::vector<LayerShape> shapes(static_cast<size_t>(layers), kShape);
    return Require(table_->Create(tenant, {0, shapes, std::chrono::hours(1), pinned})).id;
  }

  // Returns the seconds that reserving the pages took.
  double Append(int tenant, const std::string& id, int64_t layer, int64_t length, int64_t rows) {
    const CacheUse use{id, layer, length, ""};
    const auto hold = Require(table_->Hold(tenant, {&use, 1}, rows));
    const Timer::time_point begin = Timer::now();
    const Status status = hold->Reserve(pages_.data(), std::ssize(pages_));
    const double seconds = std::chrono::duration<double>(Timer::now() - begin).count();
    Require(status);
    hold->Commit();
    return seconds;
  }

  const int64_t page_bytes_;
  const int64_t all_;  // pages
  SteadyClock clock_;
  test::TestArena arena_;
  std::vector<PageNumber> pages_;  // must outlive the holds
  int64_t ids_ = 0, taken_ = 0;
  std::unique_ptr<SessionTable> table_;
  std::string trunk_, needy_;
};

void Measure(const Case& c, int rounds) {
  FullTable table(c, rounds);
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) seconds.push_back(table.Take(c.evicted));
  table.Check();
  std::sort(seconds.begin(), seconds.end());
  std::printf("| %ld | %ld | %s | %ld | %ld | %ld | %.2f ms | %.2f ms |\n", c.forks, c.own,
              c.alike ? "equal" : "different", c.pages, c.layers, c.evicted,
              1e3 * seconds[seconds.size() / 2], 1e3 * seconds.back());
  std::fflush(stdout);
}

void Main(int rounds) {
  constexpr Case kCases[] = {
      {61'000, 1, 250, true, 1},     {61'000, 1, 250, true, 1000},    {18'000, 1, 5000, true, 800},
      {10'100, 1, 10'000, false, 1}, {10'100, 1, 10'000, false, 450}, {128, 32, 5000, true, 32},
      {128, 8, 1000, true, 512, 8},
  };
  std::puts(
      "| forks | own pages | lengths | pages of a layer | layers | evicted | median | longest |");
  std::puts("|---|---|---|---|---|---|---|---|");
  for (const Case& c : kCases) Measure(c, rounds);
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) {
  CLI::App app("Measures how long the session table is locked while shared pages are evicted.");
  int rounds = 11;
  app.add_option("--rounds", rounds, "requests of each case")->check(CLI::Range(1, 100));
  CLI11_PARSE(app, argc, argv);
  try {
    attend::bench::Main(rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
