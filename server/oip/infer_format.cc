// SPDX-License-Identifier: Apache-2.0

#include "server/oip/infer_format.h"

#include <utility>

#include "server/oip/infer_parts.h"
#include "server/oip/infer_reply.h"
#include "server/oip/infer_request.h"
#include "server/oip/infer_state.h"

namespace attend::oip {

Status InferFormat::Scan(RequestMessage& message, Request& request) const {
  auto made = std::make_unique<InferState>();
  InferState& state = *made;
  auto* const fields =
      google::protobuf::Arena::CreateMessage<inference::ModelInferRequest>(&state.arena);
  state.fields = fields;
  request.protocol = std::move(made);
  const Status scanned = ScanInfer(message.slices, message.scan, state.scan);
  const bool parsed = fields->ParseFromArray(message.scan.header.data(),
                                             static_cast<int>(message.scan.header_bytes));
  request.request_id = fields->id();
  if (!scanned.ok()) return scanned;
  if (!parsed) {
    return InvalidArgument("the message is not a ModelInferRequest: its fields cannot be parsed");
  }
  if (static_cast<int64_t>(fields->id().size()) > kRequestIdBytesMax) {
    return InvalidArgument("id has " + std::to_string(fields->id().size()) +
                           " bytes, must have at most " + std::to_string(kRequestIdBytesMax));
  }
  state.id = fields->id();
  return FindParts(regions_, request.tenant, message.slices, state, message.scan.array_bytes);
}

Status InferFormat::Parse(google::protobuf::Arena& arena, MessageSlices& slices,
                          RequestMessage& message, Request& request) const {
  auto& state = static_cast<InferState&>(*request.protocol);
  return BuildRequest(arena, state, slices, message, request);
}

Status InferFormat::CheckPlaces(const Validated& validated, Request& request) const {
  const InferState& state = *InferState::Of(request);
  if (state.model->batched()) request.elements = validated.attention.problem.batch;
  for (int i = 0; i < kInputCount; ++i) {
    const RegionPart& place = state.inputs[static_cast<size_t>(i)].place;
    if (!IsTensor(static_cast<Input>(i)) || place.region == nullptr || !place.region->file)
      continue;
    request.file_bytes.input += place.bytes;
    request.transport = Transport::kSharedMemory;
  }
  for (const Output output : state.outputs) {
    const RegionPart& place = state.place_of(output);
    if (place.region == nullptr) continue;
    const int64_t bytes = OutputBytes(validated.attention, output);
    if (place.bytes < bytes) {
      return InvalidArgument("output '" + std::string(kOutputNames[static_cast<size_t>(output)]) +
                             "'s shared_memory_byte_size is " + std::to_string(place.bytes) +
                             ", should be at least " + std::to_string(bytes) +
                             " bytes to hold the results");
    }
    if (!place.region->file) continue;
    request.file_bytes.output += bytes;
    request.transport = Transport::kSharedMemory;
  }
  return Status();
}

std::vector<FilePiece> InferFormat::OutputFiles(const Request& request) const {
  const InferState& state = *InferState::Of(request);
  const auto outputs = OutputsOf(request);
  std::vector<FilePiece> files;
  for (const Output output : state.outputs) {
    if (!state.in_file(output)) continue;
    const RegionPart& place = state.place_of(output);
    const OutputTensor& tensor = outputs[static_cast<size_t>(output)];
    if (tensor.bytes == 0) continue;
    files.push_back({&*place.region->file, place.region->offset + place.offset, nullptr,
                     tensor.data, tensor.bytes});
  }
  return files;
}

void InferFormat::CountEnd(const Request& request, int64_t total_ns) const {
  const InferState* const state = InferState::Of(request);
  if (state == nullptr || state->model == nullptr) return;
  statistics_.Count(*state->model, request, total_ns);
}

OutMessage InferFormat::EncodeReply(std::unique_ptr<Request> request, int64_t total_ns) const {
  return EncodeInferReply(std::move(request), total_ns, call_ == Call::kStream);
}

std::string InferFormat::AnswerId(const Request& request) const {
  const InferState* const state = InferState::Of(request);
  return state == nullptr ? std::string() : state->id;
}

OutMessage InferFormat::EncodeFailure(const std::string& answer_id, const Status& status,
                                      const CacheRefusal&, int64_t) const {
  return EncodeInferFailure(answer_id, status);
}

}  // namespace attend::oip
