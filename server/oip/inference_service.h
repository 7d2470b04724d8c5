// SPDX-License-Identifier: Apache-2.0
//
// inference.GRPCInferenceService: the Open Inference Protocol with Triton's extensions, on the same
// engine as attend.v1. Attention calls take the path of Attend and AttendStream; all others are
// small calls.

#pragma once

#include <cstdint>
#include <string>

#include "server/oip/infer_format.h"
#include "server/oip/model_statistics.h"
#include "server/oip/region_names.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"

namespace attend::oip {

class InferenceServiceImpl final {
 public:
  struct Options {
    std::string version;         // the server's
    int64_t batch_delay_us = 0;  // how long batches wait for more requests
    RegionNames::Options regions;
  };
  // `context` must outlive the service, and the service all calls.
  InferenceServiceImpl(ServiceContext& context, Options options);

  // The service must outlive the table's calls.
  void AddTo(CallTable& table);

 private:
  void AddProbes(CallTable& table);
  void AddModels(CallTable& table);
  void AddRepository(CallTable& table);
  void AddFiles(CallTable& table);
  void AddGpuMemory(CallTable& table);
  void AddSettings(CallTable& table);
  bool Ready() const;

  ServiceContext& context_;
  const Options options_;
  RegionNames regions_;
  oip::ModelStatistics statistics_;
  const InferFormat unary_{InferFormat::Call::kUnary, regions_, statistics_};
  const InferFormat stream_{InferFormat::Call::kStream, regions_, statistics_};
};

}  // namespace attend::oip
