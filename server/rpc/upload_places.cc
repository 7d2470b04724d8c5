// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/upload_places.h"

#include <algorithm>
#include <string>

#include "server/util/thresholds.h"

namespace attend {
namespace {

std::string ChunkText(int tensor, const ChunkMessage& chunk) {
  return "chunk of " + std::string(kInputNames[tensor]) + ", offset " +
         std::to_string(chunk.offset()) + ", " + std::to_string(chunk.bytes()) + " bytes, ";
}

// The tensors that chunks may belong to: "Q (1), K (2) or V (3)".
std::string NamesText(const TensorPlaces& places) {
  constexpr std::array<const char*, kTensorsMax> kNames = {"Q", "K",   "V",   "BIAS",
                                                           "O", "LSE", "D_O", "D_LSE"};
  std::string text;
  int left = static_cast<int>(std::count(places.present.begin(), places.present.end(), true));
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!places.present[i]) continue;
    const char* const before = text.empty() ? "" : left == 1 ? " or " : ", ";
    text += before + std::string(kNames[i]) + " (" + std::to_string(i + v1::TENSOR_NAME_Q) + ")";
    --left;
  }
  return text;
}

}  // namespace

UploadPlaces::UploadPlaces(const TensorPlaces& places) : places_(places) {
  for (const int64_t bytes : places_.bytes) total_bytes_ += bytes;
}

Result<char*> UploadPlaces::Reserve(const ChunkMessage& chunk) {
  // Arbitrary values may arrive: compare before computing with them.
  const bool known =
      chunk.tensor() >= v1::TENSOR_NAME_Q && chunk.tensor() < v1::TENSOR_NAME_Q + kTensorsMax;
  if (!known || !places_.present[chunk.tensor() - v1::TENSOR_NAME_Q]) {
    return InvalidArgument("a chunk's tensor is " + std::to_string(chunk.tensor()) + ", must be " +
                           NamesText(places_));
  }
  const int tensor = chunk.tensor() - v1::TENSOR_NAME_Q;
  const int64_t size = places_.bytes[tensor];
  if (chunk.bytes() > size || chunk.offset() > static_cast<uint64_t>(size - chunk.bytes())) {
    return InvalidArgument(ChunkText(tensor, chunk) + "ends past the tensor's " +
                           std::to_string(size) + " bytes");
  }
  const int64_t begin = static_cast<int64_t>(chunk.offset());
  if (const auto overlap = ranges_[tensor].Add({begin, begin + chunk.bytes()})) {
    return InvalidArgument(ChunkText(tensor, chunk) + "overlaps bytes that arrived before: [" +
                           std::to_string(overlap->begin) + ", " + std::to_string(overlap->end) +
                           ")");
  }
  int64_t ranges = 0;
  for (const ByteRanges& each : ranges_) ranges += each.count();
  const int64_t ranges_max =
      std::clamp(total_bytes_ / thresholds::kUploadRangeBytes, thresholds::kUploadRangesLeast,
                 thresholds::kUploadRangesMost);
  if (ranges > ranges_max) {
    return InvalidArgument(ChunkText(tensor, chunk) + "would leave more than " +
                           std::to_string(ranges_max) + " separate pieces of the tensors");
  }
  return places_.data[tensor] + begin;
}

std::string UploadPlaces::MissingText() const {
  std::string text;
  for (int i = 0; i < kTensorsMax; ++i) {
    const int64_t missing = places_.bytes[i] - ranges_[i].bytes();
    if (missing == 0) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(missing) + " of " + kInputNames[i] + "'s " +
            std::to_string(places_.bytes[i]) + " bytes";
  }
  return text;
}

}  // namespace attend
