// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/shared_scripts.h"

#include <algorithm>
#include <utility>

#include "client/call/shared_call.h"
#include "client/wire/message_codec.h"
#include "tests/bench/service/stream_driver.h"

namespace attend::bench {

Result<std::vector<Script>> ShareScripts(client::SharedMemory& memory,
                                         const std::vector<std::shared_ptr<Work>>& works,
                                         int in_flight) {
  int64_t input_bytes = 0;
  int64_t place_bytes = 0;
  for (const std::shared_ptr<Work>& work : works) {
    input_bytes += client::SharedInputBytes(work->call());
    place_bytes = std::max(place_bytes, client::SharedOutputBytes(work->call()));
  }
  Result<std::shared_ptr<client::SharedRegion>> region =
      memory.Create(input_bytes + in_flight * place_bytes);
  if (!region.ok()) return region.status();
  std::vector<Script> scripts(static_cast<size_t>(in_flight));
  client::SharedPlace inputs{*region, 0};
  for (const std::shared_ptr<Work>& work : works) {
    client::AttentionCall call = work->call();
    ATTEND_RETURN_IF_ERROR(client::ShareInputs(inputs, &call));
    inputs.offset += client::SharedInputBytes(call);
    const Result<client::EncodedCall> encoded = client::EncodedCall::Make(call);
    if (!encoded.ok()) return encoded.status();
    for (int i = 0; i < in_flight; ++i) {
      // Answers of all lengths share a place, so that bytes that were not written are another's.
      const client::SharedPlace place{*region, input_bytes + i * place_bytes};
      auto prepared = std::make_shared<PreparedCall>();
      prepared->request =
          encoded->WithOutputs(client::ShareOutputs(place, call))->ToByteBuffer(StreamId(i));
      prepared->verify = [work, place](const grpc::ByteBuffer& answer, bool bytes_too) {
        return work->CheckPlacedAnswer(answer, place.data(), bytes_too);
      };
      scripts[static_cast<size_t>(i)].push_back(std::move(prepared));
    }
  }
  return scripts;
}

}  // namespace attend::bench
