// SPDX-License-Identifier: Apache-2.0
//
// Makes untrusted text safe for a log or terminal: one line, without control sequences and
// characters that change how the rest is displayed. Pure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

// Whether a character is invisible or changes how the rest of the line is displayed.
bool IsHidden(uint32_t code);

// Appends `text` with hidden characters as "\u009b", newlines as "\n" and bytes that are not UTF-8
// as "\xff". `quoted`: also escapes quotes and backslashes, for text between quotes.
void AppendPrintable(std::string_view text, bool quoted, std::string* out);
std::string Printable(std::string_view text);

}  // namespace attend
