// SPDX-License-Identifier: Apache-2.0

#include "server/wire/slice_reader.h"

#include <cstring>
#include <iterator>

namespace attend {

SliceReader::SliceReader(std::span<const ByteSpan> slices) : slices_(slices) {
  for (const ByteSpan& slice : slices_) total_ += static_cast<int64_t>(slice.size());
  SkipEmpty();
}

void SliceReader::SkipEmpty() {
  while (slice_ < slices_.size() && offset_ == static_cast<int64_t>(slices_[slice_].size())) {
    ++slice_;
    offset_ = 0;
  }
}

void SliceReader::Advance(int64_t bytes) {
  offset_ += bytes;
  position_ += bytes;
  SkipEmpty();
}

bool SliceReader::ReadVarint(uint64_t* value) {
  if (slice_ < slices_.size() && slices_[slice_][static_cast<size_t>(offset_)] < 0x80) {
    *value = slices_[slice_][static_cast<size_t>(offset_)];
    Advance(1);
    return true;
  }
  uint64_t result = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (slice_ == slices_.size()) return false;
    const uint8_t byte = slices_[slice_][static_cast<size_t>(offset_)];
    Advance(1);
    result |= static_cast<uint64_t>(byte & 0x7f) << shift;  // only bit 0 of byte 10 counts
    if (byte < 0x80) {
      *value = result;
      return true;
    }
  }
  return false;
}

bool SliceReader::Skip(int64_t bytes) {
  if (bytes < 0 || bytes > remaining()) return false;
  ForEachPiece(bytes, [](ByteSpan) {});
  return true;
}

void SliceReader::Read(void* to, int64_t bytes) {
  char* out = static_cast<char*>(to);
  ForEachPiece(bytes, [&out](ByteSpan piece) {
    const void* const from = piece.data();
    if (from != out) std::memcpy(out, from, piece.size());
    out += piece.size();
  });
}

void SliceReader::ReadPieces(void* to, int64_t bytes, std::vector<HostPiece>& pieces) {
  char* out = static_cast<char*>(to);
  ForEachPiece(bytes, [&](ByteSpan piece) {
    const void* const from = piece.data();
    if (from != out) pieces.push_back({from, out, std::ssize(piece)});
    out += piece.size();
  });
}

}  // namespace attend
