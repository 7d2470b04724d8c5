// SPDX-License-Identifier: Apache-2.0
//
// DejaVu Sans, which is built into the program, so that pictures look the same on machines without
// fonts.

#pragma once

#include <string>

#include <ft2build.h>
#include FT_FREETYPE_H

namespace attend::client {

// One thread at a time.
class Font {
 public:
  Font();
  ~Font();
  Font(const Font&) = delete;
  Font& operator=(const Font&) = delete;

  FT_Library library() const { return library_; }
  FT_Face face() const { return face_; }
  // From one glyph's origin to the next one's, as a share of the font's size.
  double Advance(char32_t letter) const;

 private:
  FT_Library library_ = nullptr;
  FT_Face face_ = nullptr;
};

// The letters of a text in UTF-8; U+FFFD for what is none.
std::u32string Letters(const std::string& text);

}  // namespace attend::client
