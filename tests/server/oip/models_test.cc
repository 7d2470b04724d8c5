// SPDX-License-Identifier: Apache-2.0
//
// The models' names, metadata and configurations agree; statistics add up.

#include "server/oip/models.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "server/oip/model_statistics.h"

namespace attend::oip {
namespace {

TEST(ModelsTest, EveryModelIsFoundByName) {
  std::set<std::string> names;
  for (const Model& model : Models()) {
    EXPECT_EQ(FindModel(model.name), &model);
    EXPECT_EQ(Models()[static_cast<size_t>(IndexOf(model))].name, model.name);
    names.insert(model.name);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kModelCount));
  for (const char* const name :
       {"attention_bf16_bhld", "attention_fp16_blhd_causal", "attention_fp32_packed_full"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_EQ(FindModel(""), nullptr);
  EXPECT_EQ(FindModel("attention_bf16"), nullptr);
}

TEST(ModelsTest, ConfigurationAndMetadataAgree) {
  for (const Model& model : Models()) {
    SCOPED_TRACE(model.name);
    inference::ModelMetadataResponse metadata;
    inference::ModelConfig config;
    FillMetadata(model, metadata);
    FillConfig(model, 7, config);
    EXPECT_EQ(metadata.name(), config.name());
    EXPECT_EQ(config.max_batch_size() > 0, model.batched());
    EXPECT_EQ(config.dynamic_batching().max_queue_delay_microseconds(), 7u);
    ASSERT_EQ(metadata.inputs_size(), config.input_size());
    const int batch = model.batched() ? 1 : 0;
    for (int i = 0; i < metadata.inputs_size(); ++i) {
      EXPECT_EQ(metadata.inputs(i).name(), config.input(i).name());
      EXPECT_EQ("TYPE_" + metadata.inputs(i).datatype(),
                inference::DataType_Name(config.input(i).data_type()));
      EXPECT_EQ(metadata.inputs(i).shape_size(), config.input(i).dims_size() + batch);
      // perf_analyzer sends every input, so a model that it is used with has no optional ones.
      EXPECT_FALSE(model.batched() && config.input(i).optional());
    }
    ASSERT_EQ(metadata.outputs_size(), 2);
    EXPECT_EQ(metadata.outputs(1).shape_size(), config.output(1).dims_size() + batch);
  }
}

void End(int64_t batch_requests, int64_t batch_elements, int64_t elements, Request& request) {
  request.received = TimePoint(Duration(1000));
  request.enqueued = TimePoint(Duration(1010));
  request.started = TimePoint(Duration(1110));
  request.batch_requests = batch_requests;
  request.batch_elements = batch_elements;
  request.elements = elements;
  request.copy_in_ns = 5;
  request.kernel_ns = 50;
  request.copy_out_ns = 3;
}

TEST(ModelStatisticsTest, AddUp) {
  oip::ModelStatistics statistics;
  const Model& model = *FindModel("attention_fp32_bhld_full");
  Request of_four, alone, large, failed;
  End(4, 12, 3, of_four);
  End(1, 1, 1, alone);
  for (int i = 0; i < 8; ++i) statistics.Count(model, of_four, 200);
  statistics.Count(model, alone, 200);
  failed.status = InvalidArgument("no");
  statistics.Count(model, failed, 40);
  inference::ModelStatistics out;
  statistics.Fill(model, out);
  EXPECT_EQ(out.name(), model.name);
  EXPECT_EQ(out.version(), kVersion);
  EXPECT_GT(out.last_inference(), 0u);
  EXPECT_EQ(out.inference_count(), 25u);
  EXPECT_EQ(out.execution_count(), 3u);  // one batch of two of the four requests, two of one
  const inference::InferStatistics& all = out.inference_stats();
  EXPECT_EQ(all.success().count(), 9u);
  EXPECT_EQ(all.success().ns(), 9u * 200);
  EXPECT_EQ(all.fail().count(), 1u);
  EXPECT_EQ(all.fail().ns(), 40u);
  EXPECT_EQ(all.queue().count(), 9u);
  EXPECT_EQ(all.queue().ns(), 9u * 100);
  EXPECT_EQ(all.compute_input().ns(), 9u * 15);
  EXPECT_EQ(all.compute_infer().ns(), 9u * 50);
  EXPECT_EQ(all.compute_output().ns(), 9u * 3);
  ASSERT_EQ(out.batch_stats_size(), 2);
  EXPECT_EQ(out.batch_stats(0).batch_size(), 1u);
  EXPECT_EQ(out.batch_stats(0).compute_infer().count(), 1u);
  EXPECT_EQ(out.batch_stats(1).batch_size(), 12u);  // Triton counts elements, not requests
  EXPECT_EQ(out.batch_stats(1).compute_infer().count(), 2u);
  EXPECT_EQ(out.batch_stats(1).compute_infer().ns(), 2u * 50);
  for (int64_t elements = 257; elements < 1000; ++elements) {
    End(1, elements, elements, large);
    statistics.Count(model, large, 200);
  }
  out.Clear();
  statistics.Fill(model, out);
  ASSERT_EQ(out.batch_stats_size(), 4);  // two sizes cover all large batches
  EXPECT_EQ(out.batch_stats(2).batch_size(), 512u);
  EXPECT_EQ(out.batch_stats(3).batch_size(), 1024u);
  EXPECT_EQ(out.batch_stats(3).compute_infer().count(), 999u - 512);
  inference::ModelStatistics other;
  statistics.Fill(*FindModel("attention_fp32_bhld"), other);
  EXPECT_EQ(other.inference_stats().success().count(), 0u);
}

}  // namespace
}  // namespace attend::oip
