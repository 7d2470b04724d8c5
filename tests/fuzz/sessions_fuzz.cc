// SPDX-License-Identifier: Apache-2.0
//
// Histories of a session table, each choice of which is a byte of the input, or two: create,
// append, fork, truncate, free, read, give up, time that passes and memory that runs out.
// A model says what must be there after every step (tests/server/support/table_history.h).

#include <gtest/gtest.h>

#include "tests/fuzz/fuzz.h"
#include "tests/server/support/table_history.h"

namespace attend::fuzz {
namespace {

// When the input is used up every choice is the lowest.
class Choices {
 public:
  explicit Choices(std::string_view input) : input_(input) {}

  bool left() const { return !input_.empty(); }
  int64_t operator()(int64_t low, int64_t high) {
    const int64_t many = high - low + 1;
    int64_t choice = Byte();
    if (many > 256) choice = choice << 8 | Byte();
    return low + choice % many;
  }

 private:
  int64_t Byte() {
    if (input_.empty()) return 0;
    const auto byte = static_cast<unsigned char>(input_.front());
    input_.remove_prefix(1);
    return byte;
  }

  std::string_view input_;
};

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  testing::GTEST_FLAG(throw_on_failure) = true;  // caught by nobody
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attend::fuzz::Choices choices(attend::fuzz::View(data, size));
  attend::test::TableHistory history(std::ref(choices));
  while (choices.left()) history.Step();
  history.End();
  return 0;
}
