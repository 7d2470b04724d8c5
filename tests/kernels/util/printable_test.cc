// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/printable.h"

#include <gtest/gtest.h>

namespace attend {
namespace {

TEST(Printable, LeavesTextUnchanged) {
  for (const char* text :
       {"", "plain, \"quoted\" and \\", "Gr\u00fc\u00dfe, \u6ce8\u610f, \U0001f600"}) {
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(Printable, EscapesTerminalControlSequences) {
  EXPECT_EQ(Printable("\x1b[2J"), "\\u001b[2J");
  EXPECT_EQ(Printable("\x1b]0;title\a"), "\\u001b]0;title\\u0007");
  EXPECT_EQ(Printable("one\r\nother\ttab"), "one\\u000d\\nother\\u0009tab");
  EXPECT_EQ(Printable("\u009b2J"), "\\u009b2J");          // control sequences of one character
  EXPECT_EQ(Printable("a\u202eb"), "a\\u202eb");          // switches to right-to-left
  EXPECT_EQ(Printable("a\U000e0041b"), "a\\U000e0041b");  // a tag
  EXPECT_EQ(Printable(std::string_view("a\0b", 3)), "a\\u0000b");
}

TEST(Printable, EscapesInvalidUtf8) {
  EXPECT_EQ(Printable("a\x9b\xff"), "a\\x9b\\xff");
  EXPECT_EQ(Printable("\xc0\x9b"), "\\xc0\\x9b");  // an overlong escape
  EXPECT_EQ(Printable("\xe2\x80"), "\\xe2\\x80");  // truncated
}

TEST(Printable, EscapesQuotesBetweenQuotes) {
  std::string out = "id=";
  AppendPrintable("a\"b\\c\n", true, &out);
  EXPECT_EQ(out, "id=a\\\"b\\\\c\\n");
}

}  // namespace
}  // namespace attend
