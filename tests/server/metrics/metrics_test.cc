// SPDX-License-Identifier: Apache-2.0
//
// The exposition as Prometheus reads it: all families and label sets exist from the start,
// recordings change the right ones, and promtool accepts it, if installed.

#include "server/metrics/metrics.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "server/app/gpu_stats.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

// Samples by "name{labels}", and the families that have HELP and TYPE.
struct Exposition {
  std::map<std::string, double> samples;
  std::set<std::string> families;

  explicit Exposition(const std::string& text) {
    std::istringstream lines(text);
    std::set<std::string> helped;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string mark, word, name;
      if (line.starts_with("# ")) {
        words >> mark >> word >> name;
        if (word == "HELP") helped.insert(name);
        if (word == "TYPE" && helped.contains(name)) families.insert(name);
        continue;
      }
      const size_t space = line.rfind(' ');
      if (space == std::string::npos) continue;
      EXPECT_TRUE(samples.emplace(line.substr(0, space), std::atof(line.c_str() + space)).second)
          << "twice: " << line;
    }
  }
};

std::string Serialize(const Metrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.registry()->Collect());
}

// All families of the contract, except those filled by NVML.
const char* const kFamilies[] = {"attend_build_info",
                                 "attend_requests_total",
                                 "attend_objective_requests_total",
                                 "attend_backward_requests_total",
                                 "attend_short_deadlines_total",
                                 "attend_early_cancellations_total",
                                 "attend_rejected_requests_total",
                                 "attend_unread_calls_total",
                                 "attend_phase_duration_seconds",
                                 "attend_batch_requests",
                                 "attend_batch_flops",
                                 "attend_batches_total",
                                 "attend_tenant_requests_total",
                                 "attend_tenant_limited_requests_total",
                                 "attend_tenant_small_calls_total",
                                 "attend_tenant_flops_total",
                                 "attend_tenant_request_duration_seconds",
                                 "attend_tenant_queue_requests",
                                 "attend_kernel_requests_total",
                                 "attend_flops_total",
                                 "attend_fallback_requests_total",
                                 "attend_fallback_kernel_seconds_total",
                                 "attend_transport_bytes_total",
                                 "attend_read_in_place_bytes_total",
                                 "attend_queue_requests",
                                 "attend_lanes",
                                 "attend_lanes_busy",
                                 "attend_outstanding_cost",
                                 "attend_device_healthy",
                                 "attend_device_phase_seconds_total",
                                 "attend_device_span_seconds_total",
                                 "attend_cut_parts_total",
                                 "attend_device_memory_used_bytes",
                                 "attend_device_memory_limit_bytes",
                                 "attend_host_memory_used_bytes",
                                 "attend_host_memory_largest_free_bytes",
                                 "attend_host_memory_budget_bytes",
                                 "attend_inflight_requests",
                                 "attend_draining",
                                 "attend_devices_left_out",
                                 "attend_reference_checks_total",
                                 "attend_reference_check_error_ratio",
                                 "attend_reference_check_rows_total",
                                 "process_start_time_seconds"};

TEST(MetricsTest, EveryFamilyAndKnownLabelSetStartsAtZero) {
  Metrics metrics("1.2.3");
  metrics.AddDevices({{"cpu", 2}, {"cuda:0", 4}}, {{"default", 1}, {"a", 3}});
  const Exposition start(Serialize(metrics));
  for (const char* family : kFamilies) EXPECT_TRUE(start.families.contains(family)) << family;
  for (const char* sample :
       {"attend_requests_total{code=\"OK\"}",
        "attend_requests_total{code=\"UNAVAILABLE\"}",
        "attend_objective_requests_total{code=\"UNAVAILABLE\"}",
        "attend_rejected_requests_total{reason=\"queue_full\"}",
        "attend_rejected_requests_total{reason=\"late\"}",
        "attend_deadline_requests_total{outcome=\"stopped\"}",
        "attend_backlog_seconds{device=\"cpu\"}",
        "attend_rejected_requests_total{reason=\"too_large\"}",
        "attend_phase_duration_seconds_count{phase=\"receive\"}",
        "attend_phase_duration_seconds_count{phase=\"check\"}",
        "attend_kernel_requests_total{device=\"cpu\",dtype=\"float16\",kernel=\"cpu_flash\"}",
        "attend_flops_total{device=\"cuda:0\",dtype=\"bfloat16\",kernel=\"cuda_naive\"}",
        "attend_transport_bytes_total{direction=\"out\",transport=\"inline\"}",
        "attend_transport_bytes_total{direction=\"in\",transport=\"chunked\"}",
        "attend_transport_bytes_total{direction=\"out\",transport=\"shm\"}",
        "attend_reference_checks_total{result=\"skipped\",transport=\"inline\"}",
        "attend_reference_checks_total{result=\"failed\",transport=\"shm\"}",
        "attend_device_phase_seconds_total{device=\"cpu\",phase=\"copy_in\"}",
        "attend_device_phase_seconds_total{device=\"cuda:0\",phase=\"copy_out\"}",
        "attend_device_span_seconds_total{device=\"cuda:0\"}",
        "attend_cut_parts_total{device=\"cuda:0\"}",
        "attend_device_memory_used_bytes{device=\"cuda:0\"}",
        "attend_tenant_requests_total{code=\"OK\",tenant=\"default\"}",
        "attend_tenant_requests_total{code=\"CANCELLED\",tenant=\"a\"}",
        "attend_tenant_limited_requests_total{tenant=\"a\"}",
        "attend_tenant_small_calls_total{code=\"RESOURCE_EXHAUSTED\",tenant=\"a\"}",
        "attend_tenant_flops_total{tenant=\"a\"}",
        "attend_tenant_request_duration_seconds_bucket{tenant=\"a\",le=\"2.5\"}",
        "attend_tenant_queue_requests{device=\"cuda:0\",tenant=\"a\"}",
        "attend_batches_total{closed=\"empty\",device=\"cpu\"}",
        "attend_batches_total{closed=\"large\",device=\"cuda:0\"}",
        "attend_reference_check_error_ratio_count",
        "attend_queue_requests{device=\"cuda:0\"}"}) {
    ASSERT_TRUE(start.samples.contains(sample)) << sample;
    EXPECT_EQ(start.samples.at(sample), 0) << sample;
  }
  EXPECT_FALSE(start.samples.contains(
      "attend_flops_total{device=\"cpu\",dtype=\"float32\",kernel=\"cuda_naive\"}"));
  EXPECT_EQ(start.samples.at("attend_lanes{device=\"cuda:0\"}"), 4);
  EXPECT_EQ(start.samples.at("attend_device_healthy{device=\"cpu\"}"), 1);
  EXPECT_GT(start.samples.at("process_start_time_seconds"), 1.6e9);
}

TEST(MetricsTest, RecordingsChangeTheRightSamples) {
  Metrics metrics("1.2.3");
  metrics.AddDevices({{"cpu", 2}}, {{"default", 1}, {"a", 3}});
  Request request;
  request.tenant = 1;
  request.selection.kernel = KernelId::kCpuFlash;
  request.attention.problem.dtype = DType::kBFloat16;
  request.flops = 1e6;
  request.message_bytes = 1000;
  request.received = TimePoint(std::chrono::milliseconds(10));
  request.enqueued = request.received + std::chrono::milliseconds(1);
  request.started = request.enqueued + std::chrono::milliseconds(2);
  request.kernel_ns = 3'000'000;
  RowsReport& report = request.report.emplace();
  report.rows_checked = 5;
  report.max_abs_error = 1;
  report.bound = 4;
  metrics.RecordFinished(request, 9'000'000, 500);
  report.ok = false;
  report.rows_checked = 2;
  report.max_abs_error = std::numeric_limits<double>::quiet_NaN();
  request.transport = Transport::kChunked;
  metrics.RecordFinished(request, 9'000'000, 500);
  request.report.reset();
  request.status = Unavailable("gone");
  metrics.RecordFinished(request, 1, 0);
  metrics.RecordRejection(Rejection::kMemory);
  metrics.RecordCheck(CheckResult::kSkipped, Transport::kSharedMemory);
  metrics.RecordBatch(0, 3, 2e6, BatchClosed::kFlops);
  metrics.SetQueue(0, 7);
  metrics.SetTenantQueue(0, 1, 6);

  Exposition now(Serialize(metrics));
  const auto expect = [&](const std::string& sample, double value) {
    ASSERT_TRUE(now.samples.contains(sample)) << sample;
    EXPECT_NEAR(now.samples.at(sample), value, 1e-9) << sample;
  };
  expect("attend_requests_total{code=\"OK\"}", 2);
  expect("attend_requests_total{code=\"UNAVAILABLE\"}", 1);
  expect("attend_rejected_requests_total{reason=\"memory\"}", 1);
  expect("attend_phase_duration_seconds_count{phase=\"total\"}", 2);
  expect("attend_phase_duration_seconds_sum{phase=\"total\"}", 0.018);
  expect("attend_phase_duration_seconds_sum{phase=\"receive\"}", 0.001);
  expect("attend_phase_duration_seconds_sum{phase=\"upload\"}", 0.001);
  expect("attend_phase_duration_seconds_sum{phase=\"queue\"}", 0.004);
  expect("attend_phase_duration_seconds_sum{phase=\"kernel\"}", 0.006);
  const std::string labels = "{device=\"cpu\",dtype=\"bfloat16\",kernel=\"cpu_flash\"}";
  expect("attend_kernel_requests_total" + labels, 2);
  expect("attend_flops_total" + labels, 2e6);
  expect("attend_transport_bytes_total{direction=\"in\",transport=\"inline\"}", 1000);
  expect("attend_transport_bytes_total{direction=\"in\",transport=\"chunked\"}", 1000);
  expect("attend_transport_bytes_total{direction=\"out\",transport=\"inline\"}", 500);
  expect("attend_reference_checks_total{result=\"ok\",transport=\"inline\"}", 1);
  expect("attend_reference_checks_total{result=\"failed\",transport=\"chunked\"}", 1);
  expect("attend_reference_checks_total{result=\"skipped\",transport=\"shm\"}", 1);
  expect("attend_reference_check_rows_total", 7);
  expect("attend_reference_check_error_ratio_bucket{le=\"0.25\"}", 1);
  EXPECT_TRUE(std::isfinite(now.samples.at("attend_reference_check_error_ratio_sum")));
  expect("attend_batch_requests_sum{device=\"cpu\"}", 3);
  expect("attend_batch_flops_sum{device=\"cpu\"}", 2e6);
  expect("attend_queue_requests{device=\"cpu\"}", 7);
  expect("attend_batches_total{closed=\"flops\",device=\"cpu\"}", 1);
  expect("attend_batches_total{closed=\"bytes\",device=\"cpu\"}", 0);
  expect("attend_tenant_requests_total{code=\"OK\",tenant=\"a\"}", 2);
  expect("attend_tenant_requests_total{code=\"UNAVAILABLE\",tenant=\"a\"}", 1);
  expect("attend_tenant_requests_total{code=\"OK\",tenant=\"default\"}", 0);
  expect("attend_tenant_flops_total{tenant=\"a\"}", 2e6);
  expect("attend_tenant_queue_requests{device=\"cpu\",tenant=\"a\"}", 6);
  expect("attend_tenant_queue_requests{device=\"cpu\",tenant=\"default\"}", 0);
}

// Such an answer counts as neither right nor wrong.
TEST(MetricsTest, AnUndecidedCheckIsCountedSeparately) {
  Metrics metrics("1.2.3");
  metrics.AddDevices({{"cpu", 1}});
  Request request;
  RowsReport& report = request.report.emplace();
  report.ok = false;
  report.undecided = true;
  report.rows_checked = 7;
  report.rows_unjudged = 3;
  metrics.RecordFinished(request, 1, 0);
  Exposition now(Serialize(metrics));
  const std::string checks = "attend_reference_checks_total{result=\"";
  EXPECT_EQ(now.samples.at(checks + "undecided\",transport=\"inline\"}"), 1);
  EXPECT_EQ(now.samples.at(checks + "failed\",transport=\"inline\"}"), 0);
  EXPECT_EQ(now.samples.at(checks + "ok\",transport=\"inline\"}"), 0);
  EXPECT_EQ(now.samples.at("attend_reference_check_rows_unjudged_total"), 3);
}

TEST(MetricsTest, ARequestCountsForTheDeviceAndKernelThatRanIt) {
  Metrics metrics("1.2.3");
  metrics.AddDevices({{"cuda:0", 4}, {"cuda:1", 4}, {"cuda:2", 4}});
  Request request;
  request.selection.kernel = KernelId::kCudaFlashSm90;
  request.attention.problem.dtype = DType::kFloat16;
  request.flops = 9;
  request.device = 1;
  metrics.RecordFinished(request, 1, 0);
  request.selection.fallback = Fallback::kBias;
  request.flops = 0;
  request.kernel_ns = 6'000'000'000;
  request.batch_requests = 3;
  metrics.RecordFinished(request, 1, 0);
  metrics.SetOutstanding(2, 1.5);
  Exposition now(Serialize(metrics));
  const std::string labels = "\",dtype=\"float16\",kernel=\"cuda_flash_sm90\"}";
  const double flops[] = {0, 9, 0};
  const double requests[] = {0, 2, 0};
  for (int i = 0; i < 3; ++i) {
    const std::string device = "{device=\"cuda:" + std::to_string(i) + labels;
    EXPECT_EQ(now.samples.at("attend_flops_total" + device), flops[i]);
    EXPECT_EQ(now.samples.at("attend_kernel_requests_total" + device), requests[i]);
  }
  EXPECT_EQ(now.samples.at("attend_outstanding_cost{device=\"cuda:2\"}"), 1.5);
  const std::string bias = "{device=\"cuda:1\",reason=\"bias\"}";
  EXPECT_EQ(now.samples.at("attend_fallback_requests_total" + bias), 1);
  EXPECT_EQ(now.samples.at("attend_fallback_kernel_seconds_total" + bias), 2);
  EXPECT_EQ(now.samples.at("attend_fallback_requests_total{device=\"cuda:1\",reason=\"pages\"}"),
            0);
}

// Overlap is the sum of phases over the span: 1 for a batch whose phases follow each other, 2 here.
TEST(MetricsTest, BatchesAddToPhasesSpanAndParts) {
  Metrics metrics("1.2.3");
  metrics.AddDevices({{"cpu", 1}, {"cuda:0", 4}});
  BatchOutcome outcome;
  outcome.copy_in_ns = 3'000'000;
  outcome.kernel_ns = 4'000'000;
  outcome.copy_out_ns = 1'000'000;
  outcome.span_ns = 4'000'000;
  outcome.cut_parts = 12;
  metrics.RecordOutcome(1, outcome);
  outcome.cut_parts = 0;
  metrics.RecordOutcome(1, outcome);
  metrics.SetDeviceMemory(1, {/*used_bytes=*/5, /*limit_bytes=*/9});
  Exposition now(Serialize(metrics));
  const auto phase = [&](const std::string& device, const std::string& name) {
    return now.samples.at("attend_device_phase_seconds_total{device=\"" + device + "\",phase=\"" +
                          name + "\"}");
  };
  EXPECT_NEAR(phase("cuda:0", "copy_in"), 0.006, 1e-9);
  EXPECT_NEAR(phase("cuda:0", "kernel"), 0.008, 1e-9);
  EXPECT_NEAR(phase("cuda:0", "copy_out"), 0.002, 1e-9);
  EXPECT_EQ(phase("cpu", "kernel"), 0);
  EXPECT_NEAR(now.samples.at("attend_device_span_seconds_total{device=\"cuda:0\"}"), 0.008, 1e-9);
  EXPECT_EQ(now.samples.at("attend_cut_parts_total{device=\"cuda:0\"}"), 12);
  EXPECT_EQ(now.samples.at("attend_cut_parts_total{device=\"cpu\"}"), 0);
  EXPECT_EQ(now.samples.at("attend_device_memory_used_bytes{device=\"cuda:0\"}"), 5);
  EXPECT_EQ(now.samples.at("attend_device_memory_limit_bytes{device=\"cuda:0\"}"), 9);
}

TEST(MetricsTest, AScrapeHasTheDevicesMemoryAndParts) {
  test::TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  server.backend().CutItems([](const Problem&) { return true; }, 7);
  server.backend().SetMemoryUse({1000, 4000});
  v1::AttendResponse response;
  grpc::ClientContext context;
  const v1::AttendRequest request = test::PlainWireProblem(1).request;
  ASSERT_TRUE(server.Stub()->Attend(&context, request, &response).ok());
  const Exposition scrape(server.Metrics());
  EXPECT_EQ(scrape.samples.at("attend_cut_parts_total{device=\"cpu\"}"), 7);
  EXPECT_EQ(scrape.samples.at("attend_batches_total{closed=\"large\",device=\"cpu\"}"), 1);
  EXPECT_EQ(scrape.samples.at("attend_device_memory_used_bytes{device=\"cpu\"}"), 1000);
  EXPECT_EQ(scrape.samples.at("attend_device_memory_limit_bytes{device=\"cpu\"}"), 4000);
}

// Unknown tenant names in call metadata create no label sets; their requests count for "default".
TEST(MetricsTest, OnlyConfiguredTenantsHaveLabelSets) {
  test::TestServer server([](Config& config) {
    config.metrics_listen = "127.0.0.1:0";
    config.tenants = *Tenants::Parse({"a=2"});
  });
  const test::WireProblem problem = test::PlainWireProblem(1);
  const auto stub = server.Stub();
  for (const char* tenant : {"a", "", "stranger", "A", "a"}) {
    v1::AttendResponse response;
    grpc::ClientContext context;
    if (*tenant != '\0') context.AddMetadata(kTenantMetadataKey, tenant);
    ASSERT_TRUE(stub->Attend(&context, problem.request, &response).ok());
  }
  grpc::ClientContext context;
  context.AddMetadata(kTenantMetadataKey, "a");
  const auto stream = stub->AttendStream(&context);
  v1::AttendResponse answer;
  ASSERT_TRUE(stream->Write(problem.request));
  ASSERT_TRUE(stream->Read(&answer));
  stream->WritesDone();
  ASSERT_TRUE(stream->Finish().ok());

  grpc::ClientContext info_context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub->GetServerInfo(&info_context, {}, &info).ok());
  ASSERT_EQ(info.tenants_size(), 2) << "every caller is told the names";
  EXPECT_EQ(info.tenants(0), "default");
  EXPECT_EQ(info.tenants(1), "a");

  const Exposition scrape(server.Metrics());
  const std::string name = "attend_tenant_requests_total{code=\"OK\",tenant=";
  EXPECT_EQ(scrape.samples.at(name + "\"a\"}"), 3);
  EXPECT_EQ(scrape.samples.at(name + "\"default\"}"), 3);
  EXPECT_EQ(scrape.samples.at("attend_requests_total{code=\"OK\"}"), 6);
  EXPECT_GT(scrape.samples.at("attend_tenant_flops_total{tenant=\"a\"}"), 0);
  const std::string durations = "attend_tenant_request_duration_seconds_count{tenant=";
  EXPECT_EQ(scrape.samples.at(durations + "\"a\"}"), 3);
  EXPECT_EQ(scrape.samples.at(durations + "\"default\"}"), 3);
  EXPECT_EQ(scrape.samples.at("attend_batches_total{closed=\"empty\",device=\"cpu\"}"), 6);
  for (const auto& [sample, value] : scrape.samples) {
    EXPECT_EQ(sample.find("tenant=\"stranger\""), std::string::npos) << sample;
  }
}

TEST(GpuStatsTest, GpuFamiliesExistWithoutGpus) {
  const GpuStats stats({"cpu"});
  const auto families = stats.Collect();
  ASSERT_EQ(families.size(), 3u);
  for (const auto& family : families) EXPECT_TRUE(family.metric.empty());
}

TEST(GpuStatsTest, FollowsCudaVisibleDevices) {
  EXPECT_EQ(VisibleGpu(nullptr, 2), "2");
  EXPECT_EQ(VisibleGpu("3,1", 0), "3");
  EXPECT_EQ(VisibleGpu("3,1", 1), "1");
  EXPECT_EQ(VisibleGpu("3,1", 2), "");
  EXPECT_EQ(VisibleGpu("GPU-1234", 0), "GPU-1234");
  EXPECT_EQ(VisibleGpu("", 0), "");
}

}  // namespace
}  // namespace attend
