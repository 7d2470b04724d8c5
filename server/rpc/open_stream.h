// SPDX-License-Identifier: Apache-2.0
//
// Begins a call that stays open between requests.

#pragma once

#include <grpcpp/grpcpp.h>

#include <new>
#include <type_traits>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"

namespace attend {

using RawStream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// A stream that there is no memory for.
class NoMemoryStream final : public RawStream {
 public:
  NoMemoryStream() { Finish(NoMemory()); }
  void OnDone() override { delete this; }
};

// Begins the stream that `make` makes, and ends it if streams are no longer accepted.
template <class Make>
RawStream* OpenStream(ServiceContext& context, const Make& make) {
  OpenStreams::Place place;
  std::invoke_result_t<Make> stream = nullptr;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    place = OpenStreams::MakePlace();
    stream = make();
  } catch (const std::bad_alloc&) {
    return new NoMemoryStream();
  }
  if (context.streams.Add(std::move(place), stream)) stream->EndWhenIdle();
  stream->Begin();
  return stream;
}

}  // namespace attend
