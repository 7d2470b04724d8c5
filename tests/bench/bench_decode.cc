// SPDX-License-Identifier: Apache-2.0
//
// The speed of cpu_flash's decoding, one new token and many keys, compared with this machine's
// memory bandwidth with the same threads, and with the tile code, which would compute these
// problems otherwise. Every case is checked against the reference first; a wrong result prints no
// time.
//
// Nothing is timed with a warm cache: each case has several copies of its K and V, more than
// kColdBytes together, and every run of the kernel, of the tile code or of the bandwidth
// measurement uses the next copy.

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/parallel.h"
#include "kernels/reference/check_rows.h"
#include "kernels/util/host_mapping.h"
#include "tests/bench/read_rate.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Larger than any last-level cache.
constexpr int64_t kColdBytes = int64_t{768} << 20;

struct Case {
  std::string name;
  test::ProblemSpec spec;
};

std::string Named(const Problem& p, const char* layout) {
  std::string name(p.dtype == DType::kFloat32 ? "fp32" : "bf16");
  return name + " D" + std::to_string(p.dim) + " Lk" + std::to_string(p.len_k) + " group " +
         std::to_string(p.group()) +
         (p.len_q > 1 ? " Lq" + std::to_string(p.len_q) : std::string()) + layout;
}

std::vector<Case> Cases() {
  constexpr int64_t kHeadsKv = 8;
  const auto make = [](int64_t group, int64_t rows, int64_t keys, int64_t dim, DType dtype) {
    test::ProblemSpec spec =
        test::MakeSpec(1, kHeadsKv * group, kHeadsKv, rows, keys, dim, dim, dtype);
    spec.problem.mask.right = 0;
    spec.problem.return_lse = false;
    return spec;
  };
  std::vector<Case> cases;
  const auto add = [&cases](const test::ProblemSpec& spec, const char* layout) {
    cases.push_back({Named(spec.problem, layout), spec});
  };
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t dim : {128, 64}) {
      for (const int64_t keys : {2048, 8192, 65536}) {
        for (const int64_t group : {1, 4, 8}) add(make(group, 1, keys, dim, dtype), "");
      }
    }
  }
  const test::ProblemSpec plain = make(4, 1, 8192, 128, DType::kBFloat16);
  test::ProblemSpec blhd = plain;
  blhd.layout = test::Layout::kBLHD;
  add(blhd, " BLHD");
  add(test::InPages(plain, 16), " pages of 16");
  add(test::InPages(plain, 128), " pages of 128");
  // Numbers of rows around which tiles become faster.
  for (const int64_t rows : {2, 3, 4, 5, 6, 8}) {
    add(make(4, rows, 8192, 128, DType::kBFloat16), "");
  }
  return cases;
}

// A copy of the inputs of an attention.
class Copy {
 public:
  explicit Copy(const test::OwnedAttention& owned) : bytes_(owned.input.bytes) {
    data_ = static_cast<std::byte*>(std::move(MapHostMemory(bytes_)).value());
    std::memcpy(data_, owned.input.data, static_cast<size_t>(bytes_));
    attention_ = owned.attention;
    const auto move = [&](auto*& at) {
      if (at == nullptr) return;
      const auto* from = static_cast<const std::byte*>(owned.input.data);
      const auto distance = reinterpret_cast<const std::byte*>(at) - from;
      at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(data_ + distance);
    };
    for (ConstTensorView* view : {&attention_.q, &attention_.k, &attention_.v}) move(view->data);
    move(attention_.kv_pages.pages);
  }
  ~Copy() { UnmapHostMemory(data_, bytes_); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  const Attention& attention() const { return attention_; }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  const int64_t bytes_;
  std::byte* data_;
  Attention attention_;
};

// The alternative to the decoding path: each KV head's rows as tiles, the heads in parallel.
void RunTiles(const Attention& a) {
  const cpu_flash::TileFunction run = cpu_flash::ChooseTileFunction();
  const Problem& p = a.problem;
  const int64_t together = std::clamp<int64_t>(cpu_flash::kRowTile / p.len_q, 1, p.group());
  const int64_t tiles = p.group() / together;
  ParallelInOrder(p.heads_kv * tiles, [&](int64_t n) {
    thread_local std::unique_ptr<cpu_flash::Scratch> scratch(new cpu_flash::Scratch);
    run({&a, 0, n * together, together, 0, p.len_q, 0.0, nullptr}, scratch.get());
  });
}

template <class Body>
double Seconds(const Body& body) {
  const Clock::time_point begin = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The minimum and the median.
struct Times {
  explicit Times(std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    best = seconds.front();
    median = seconds[seconds.size() / 2];
  }
  double best;
  double median;
};

bool Right(const Attention& a, const std::string& name, const char* what) {
  const RowsReport report = CheckRows(a, SampleRows(a, 1, 3e7));
  if (!report.ok) std::printf("%-36s WRONG (%s): %s\n", name.c_str(), what, report.detail.c_str());
  return report.ok;
}

bool Measure(const Case& c, int threads, tbb::task_arena* arena, double seconds) {
  test::OwnedAttention owned = test::MakeAttention(c.spec, test::FreshSeed());
  const auto flash = [&](const Attention& a) {
    const Attention* batch[] = {&a};
    arena->execute([&] { CpuFlash(batch); });
  };
  const auto tiles = [&](const Attention& a) { arena->execute([&] { RunTiles(a); }); };
  tiles(owned.attention);
  if (!Right(owned.attention, c.name, "tiles")) return false;
  owned.ResetOutput();
  flash(owned.attention);
  if (!Right(owned.attention, c.name, "cpu_flash")) return false;
  // An odd number, so that every contender reads every copy.
  std::vector<std::unique_ptr<Copy>> copies;
  while (static_cast<int64_t>(copies.size()) * owned.input.bytes < kColdBytes ||
         copies.size() < 3 || copies.size() % 2 == 0) {
    copies.push_back(std::make_unique<Copy>(owned));
  }
  size_t turn = 0;
  const auto next = [&]() -> const Copy& { return *copies[turn++ % copies.size()]; };
  const Problem& p = c.spec.problem;
  const double bytes = static_cast<double>((ElementsK(p) + ElementsV(p)) * DTypeBytes(p.dtype));
  std::vector<double> ours, theirs, reads;
  const Clock::time_point start = Clock::now();
  while (ours.size() < 7 || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    const Copy& mine = next();
    ours.push_back(Seconds([&] { flash(mine.attention()); }));
    reads.push_back(bytes / MeasureReadRate(next().bytes(), threads));
    const Copy& tiled = next();
    theirs.push_back(Seconds([&] { tiles(tiled.attention()); }));
    if (copies.size() % 3 == 0) next();
  }
  const Times kernel(ours);
  const Times reading(reads);
  const Times tile(theirs);
  std::printf("%-36s %9.1f us %7.1f %7.1f %5.2f %7.1f %7.1f %5.2f %9.1f us %6.2fx %5zu\n",
              c.name.c_str(), kernel.median * 1e6, bytes / kernel.median * 1e-9,
              bytes / reading.median * 1e-9, reading.median / kernel.median,
              bytes / kernel.best * 1e-9, bytes / reading.best * 1e-9, reading.best / kernel.best,
              tile.median * 1e6, tile.median / kernel.median, ours.size());
  std::fflush(stdout);
  return true;
}

int Main(int argc, char** argv) {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  double seconds = 1.0;
  std::string filter;
  CLI::App app("Times cpu_flash's decoding against this machine's memory");
  app.add_option("--threads", threads, "Threads to use")->capture_default_str();
  app.add_option("--seconds", seconds, "Seconds for each case")->capture_default_str();
  app.add_option("--filter", filter, "Run only cases whose name contains this");
  CLI11_PARSE(app, argc, argv);
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<size_t>(threads));
  tbb::task_arena arena(threads);
  std::printf("target %s, %d threads, 8 KV heads, B1\n", CpuFlashTarget().c_str(), threads);
  std::printf("GB/s of K and V, and of reading memory: medians, then the best of all runs\n");
  std::printf("%-36s %12s %7s %7s %5s %7s %7s %5s %12s %7s %5s\n", "case", "median", "median",
              "memory", "ratio", "best", "memory", "ratio", "as tiles", "faster", "runs");
  bool ok = true;
  for (const Case& c : Cases()) {
    if (c.name.find(filter) == std::string::npos) continue;
    ok = Measure(c, threads, &arena, seconds) && ok;
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) { return attend::bench::Main(argc, argv); }
