// SPDX-License-Identifier: Apache-2.0

#include "client/plot/font.h"

#include <new>
#include <stdexcept>

// The file's bytes, from the path that CMake found.
asm(R"(.section .rodata
.balign 16
.globl attend_font_begin
attend_font_begin:
.incbin ")" ATTEND_FONT_FILE R"("
.globl attend_font_end
attend_font_end:
.byte 0
.previous
)");
extern "C" const unsigned char attend_font_begin[];
extern "C" const unsigned char attend_font_end[];

namespace attend::client {

Font::Font() {
  if (FT_Init_FreeType(&library_) != 0) throw std::bad_alloc();
  const auto bytes = static_cast<FT_Long>(attend_font_end - attend_font_begin);
  if (FT_New_Memory_Face(library_, attend_font_begin, bytes, 0, &face_) != 0) {
    FT_Done_FreeType(library_);
    throw std::runtime_error("FreeType cannot read the font of this program");
  }
}

Font::~Font() {
  FT_Done_Face(face_);
  FT_Done_FreeType(library_);
}

double Font::Advance(char32_t letter) const {
  const FT_UInt glyph = FT_Get_Char_Index(face_, letter);
  if (FT_Load_Glyph(face_, glyph, FT_LOAD_NO_SCALE) != 0) return 0;
  return static_cast<double>(face_->glyph->metrics.horiAdvance) / face_->units_per_EM;
}

std::u32string Letters(const std::string& text) {
  constexpr char32_t kNone = 0xFFFD;
  std::u32string letters;
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    const int more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : 3;
    if (first >= 0x80 && (first < 0xC2 || first > 0xF4)) {
      letters += kNone;
      continue;
    }
    char32_t letter = more == 0 ? first : first & (0x3Fu >> more);
    int read = 0;
    for (; read < more && i < text.size() && (text[i] & 0xC0) == 0x80; ++read) {
      letter = letter << 6 | (static_cast<unsigned char>(text[i++]) & 0x3Fu);
    }
    letters += read == more ? letter : kNone;
  }
  return letters;
}

}  // namespace attend::client
