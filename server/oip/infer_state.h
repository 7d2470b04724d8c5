// SPDX-License-Identifier: Apache-2.0
//
// The state of a ModelInferRequest from its arrival to its answer.

#pragma once

#include <google/protobuf/arena.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "inference/grpc_service.pb.h"
#include "server/oip/infer_scan.h"
#include "server/oip/models.h"
#include "server/oip/region_names.h"
#include "server/request/request.h"

namespace attend::oip {

// A part of a region, named by a tensor's parameters.
struct RegionPart {
  NamedRegionRef region;  // null: the tensor's bytes are in the message
  int64_t offset = 0;     // within the region
  int64_t bytes = 0;      // as the client claims
};

struct InferState final : ProtocolState {
  struct InputPart {
    // Null: the input is absent.
    const inference::ModelInferRequest::InferInputTensor* tensor = nullptr;
    MessagePart raw;       // its entry of raw_input_contents
    MessagePart contents;  // or its typed contents
    RegionPart place;      // or its place in a region
  };

  // Valid until EndDecoding:
  google::protobuf::Arena arena;
  // On the arena; without tensor bytes.
  const inference::ModelInferRequest* fields = nullptr;
  InferScan scan;
  std::array<InputPart, kInputCount> inputs;  // by Input
  // Appended to the message: numbers in AttendRequest's encoding.
  std::vector<uint8_t> tail;

  // Valid until the answer:
  std::string id;                           // the client's
  const Model* model = nullptr;             // null: unknown
  std::vector<Output> outputs;              // kO and kLse in the requested order
  std::array<RegionPart, 2> output_places;  // by Output

  void EndDecoding() override {
    fields = nullptr;
    inputs = {};
    tail = std::vector<uint8_t>();
    arena.Reset();
  }
  const RegionPart& place_of(Output output) const {
    return output_places[static_cast<size_t>(output)];
  }
  bool in_file(Output output) const {
    return place_of(output).region != nullptr && place_of(output).region->file.has_value();
  }
  static const InferState* Of(const Request& request) {
    return static_cast<const InferState*>(request.protocol.get());
  }
};

}  // namespace attend::oip
