// SPDX-License-Identifier: Apache-2.0

#include "server/wire/tensor_copies.h"

namespace attend {
namespace {

// Calls take(raw, place) for each inline tensor. The raw entries are in the order of the tensors.
template <class Take>
void ForEachRaw(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                Request& request, const Take& take) {
  char* const input = static_cast<char*>(request.input.data());
  if (input == nullptr) return;  // every inline tensor is empty
  for (int i = 0, raw = 0; i < kTensorsMax; ++i) {
    if (validated.in_message(i)) take(message.scan.raw[raw++], input + plan.tensors[i]);
  }
}

// Calls take(reader, place, bytes) for those in the message, with the reader at the first byte.
template <class Take>
void ForEachInMessage(const RequestMessage& message, const Validated& validated,
                      const MemoryPlan& plan, Request& request, const Take& take) {
  SliceReader reader(message.slices);
  ForEachRaw(message, validated, plan, request, [&](const MessageScan::Raw& raw, char* place) {
    if (raw.file != nullptr) return;
    // Other protocols may order them differently.
    if (raw.offset < reader.position()) reader = SliceReader(message.slices);
    reader.Skip(raw.offset - reader.position());
    take(reader, place, raw.bytes);
  });
}

}  // namespace

void CopyTensors(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request) {
  ForEachInMessage(
      message, validated, plan, request,
      [](SliceReader& reader, char* place, int64_t bytes) { reader.Read(place, bytes); });
}

std::vector<HostPiece> TensorPieces(const RequestMessage& message, const Validated& validated,
                                    const MemoryPlan& plan, Request& request) {
  std::vector<HostPiece> pieces;
  pieces.reserve(message.slices.size() + kTensorsMax);
  ForEachInMessage(message, validated, plan, request,
                   [&pieces](SliceReader& reader, char* place, int64_t bytes) {
                     reader.ReadPieces(place, bytes, pieces);
                   });
  return pieces;
}

std::vector<FilePiece> TensorFiles(const RequestMessage& message, const Validated& validated,
                                   const MemoryPlan& plan, Request& request) {
  std::vector<FilePiece> files;
  ForEachRaw(message, validated, plan, request, [&](const MessageScan::Raw& raw, char* place) {
    if (raw.file == nullptr || raw.bytes == 0) return;
    files.push_back({raw.file, raw.offset, place, nullptr, raw.bytes});
  });
  return files;
}

}  // namespace attend
