// SPDX-License-Identifier: Apache-2.0

#include "server/answer_chunks.h"

#include <algorithm>

namespace attend {

grpc::ByteBuffer AnswerChunks::Next(int64_t bytes_max) {
  Run& run = runs_.front();
  const int64_t bytes = std::min(bytes_max, run.bytes);
  grpc::ByteBuffer message = EncodeChunk(run.name, run.offset, run.data, bytes, block_);
  run.data += bytes;
  run.offset += bytes;
  run.bytes -= bytes;
  if (run.bytes == 0) runs_.pop_front();
  return message;
}

}  // namespace attend
