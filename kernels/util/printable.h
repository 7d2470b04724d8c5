// SPDX-License-Identifier: Apache-2.0
//
// Text that others have written, as a log or a terminal may show it: on one line, and without what
// moves a cursor, gives a terminal orders, or changes how the rest is seen. Pure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

// Characters that a reader would not see, or that change how the rest of the line is seen.
bool IsHidden(uint32_t code);

// Appends the text with hidden characters as "\u009b", newlines as "\n" and bytes that are not
// UTF-8 as "\xff". `quoted`: for a place between quotes; quotes and backslashes are escaped too.
void AppendPrintable(std::string_view text, bool quoted, std::string* out);
std::string Printable(std::string_view text);

}  // namespace attend
