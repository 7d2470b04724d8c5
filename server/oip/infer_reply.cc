// SPDX-License-Identifier: Apache-2.0

#include "server/oip/infer_reply.h"

#include <google/protobuf/arena.h>

#include <array>
#include <utility>

#include "server/oip/infer_state.h"
#include "server/oip/models.h"
#include "server/wire/protobuf_wire.h"
#include "server/wire/reply_codec.h"
#include "server/wire/status_text.h"

namespace attend::oip {
namespace {

using Response = inference::ModelInferResponse;

void FillParameters(const Request& request, int64_t total_ns, bool on_stream, Response& response) {
  auto& parameters = *response.mutable_parameters();
  const std::string_view kernel = KernelName(request.selection.kernel);
  parameters["kernel"].set_string_param(std::string(kernel));
  parameters["device"].set_string_param(request.device_name);
  parameters["batch_requests"].set_int64_param(request.batch_requests);
  parameters["queue_ns"].set_int64_param(NanosecondsBetween(request.enqueued, request.started));
  parameters["kernel_ns"].set_int64_param(request.kernel_ns);
  parameters["total_ns"].set_int64_param(total_ns);
  if (on_stream) parameters["triton_final_response"].set_bool_param(true);
  if (!request.report) return;
  parameters["check_ok"].set_bool_param(request.report->ok);
  parameters["check_undecided"].set_bool_param(request.report->undecided);
  parameters["check_rows"].set_int64_param(request.report->rows_checked);
  parameters["check_max_abs_error"].set_double_param(request.report->max_abs_error);
  parameters["check_bound"].set_double_param(request.report->bound);
}

void AddOutput(const Request& request, const InferState& state, Output output, Response& response) {
  v1::Tensor like;
  FillOutput(request, output, &like);
  Response::InferOutputTensor* const tensor = response.add_outputs();
  tensor->set_name(kOutputNames[static_cast<size_t>(output)]);
  tensor->set_datatype(std::string(DatatypeOf(static_cast<DType>(like.dtype()))));
  tensor->mutable_shape()->Swap(like.mutable_shape());
  const RegionPart& place = state.place_of(output);
  if (place.region == nullptr) return;
  auto& parameters = *tensor->mutable_parameters();
  parameters["shared_memory_region"].set_string_param(place.region->name);
  parameters["shared_memory_byte_size"].set_int64_param(static_cast<int64_t>(like.byte_length()));
  if (place.offset != 0) parameters["shared_memory_offset"].set_int64_param(place.offset);
}

}  // namespace

OutMessage EncodeInferReply(std::unique_ptr<Request> request, int64_t total_ns, bool on_stream) {
  const InferState& state = *InferState::Of(*request);
  google::protobuf::Arena arena;
  auto* const response = google::protobuf::Arena::CreateMessage<Response>(&arena);
  response->set_model_name(state.model->name);
  response->set_model_version(kVersion);
  response->set_id(state.id);
  FillParameters(*request, total_ns, on_stream, *response);
  const auto outputs = OutputsOf(*request);
  std::array<RawTensor, kOutputsMax> tensors;
  size_t count = 0;
  for (const Output output : state.outputs) {
    AddOutput(*request, state, output, *response);
    const OutputTensor& tensor = outputs[static_cast<size_t>(output)];
    const bool placed = state.place_of(output).region != nullptr;
    tensors.at(count++) = placed ? RawTensor() : RawTensor{tensor.data, tensor.bytes};
  }
  HostBlock block = std::move(request->output);
  request.reset();  // releases the input block and regions before the answer is sent
  constexpr uint64_t kRaw = wire::BytesTag(Response::kRawOutputContentsFieldNumber);
  constexpr uint64_t kOuter =
      wire::BytesTag(inference::ModelStreamInferResponse::kInferResponseFieldNumber);
  return AssembleAnswer({*response, kRaw, {tensors.data(), count}, on_stream ? kOuter : 0},
                        std::move(block));
}

OutMessage EncodeInferFailure(const std::string& id, const Status& status) {
  inference::ModelStreamInferResponse response;
  response.set_error_message(CutMessage(status.message()));
  response.mutable_infer_response()->set_id(id);
  return OutMessage::Of(response.SerializeAsString());
}

}  // namespace attend::oip
