// SPDX-License-Identifier: Apache-2.0

#include "server/memory/copy_pieces.h"

#include <gtest/gtest.h>

#include <future>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/wire/slice_reader.h"
#include "tests/server/support/messages.h"

namespace attend {
namespace {

TEST(CopyPiecesTest, CopiesEveryByteOnceThenReportsDone) {
  std::mt19937_64 random(test::FreshSeed());
  for (const int threads : {1, 3}) {
    WorkerThreads workers("test", threads);
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}, size_t{9'000'001}}) {
      std::string from(bytes, '\0');
      for (size_t i = 0; i < bytes; i += 97) from[i] = static_cast<char>(random());
      std::string to(bytes, '\x5a');
      const test::Pieces pieces(from, random);
      SliceReader reader(pieces.spans());
      std::vector<HostPiece> copy;
      reader.ReadPieces(to.data(), static_cast<int64_t>(bytes), copy);
      std::promise<void> done;
      CopyPieces(workers, copy, [&done] { done.set_value(); });
      done.get_future().get();
      EXPECT_TRUE(to == from) << bytes;
    }
  }
}

TEST(CopyPiecesTest, ALargeCopyDoesNotBlockASmallOne) {
  std::promise<void> gate;
  std::vector<std::string> done;  // on the only thread
  constexpr size_t kLarge = size_t{32} << 20;
  const std::string from(kLarge, 'x');
  std::string to(3 * kLarge, ' ');
  {
    WorkerThreads workers("test", 1);
    workers.Post([opened = gate.get_future().share()] { opened.wait(); });
    for (size_t n = 0; n < 2; ++n) {
      CopyPieces(workers, {{from.data(), to.data() + n * kLarge, static_cast<int64_t>(kLarge)}},
                 [&done] { done.push_back("large"); });
    }
    CopyPieces(workers, {{from.data(), to.data() + 2 * kLarge, 1}},
               [&done] { done.push_back("small"); });
    gate.set_value();
  }
  EXPECT_EQ(done, (std::vector<std::string>{"small", "large", "large"}));
  EXPECT_EQ(to.find(' '), 2 * kLarge + 1);
}

}  // namespace
}  // namespace attend
