// SPDX-License-Identifier: Apache-2.0

#include "server/app/observing.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "server/app/options.h"
#include "server/app/otlp_sink.h"
#include "server/metrics/make_family.h"
#include "server/util/random_token.h"

namespace attend {

AccessLog::Options MakeAccessLogOptions(const Config& config) {
  AccessLog::Options options;
  if (config.access_log != "stderr") options.path = config.access_log;
  options.sample = config.access_log_sample;
  options.slow = Seconds(config.access_log_slow_seconds);
  options.rate = config.access_log_rate;
  return options;
}

Result<std::unique_ptr<Tracer>> MakeTracer(const Config& config, Logger& logger,
                                           const Clock& clock) {
  const Result<std::string> random = RandomToken();
  if (!random.ok()) return random.status();
  Tracer::Seeds seeds;
  static_assert(sizeof(seeds) == kTokenBytes);
  std::memcpy(&seeds, random->data(), sizeof(seeds));
  const Result<std::string> instance = RandomToken();
  if (!instance.ok()) return instance.status();
  Result<std::unique_ptr<OtlpSink>> sink = OtlpSink::Make(
      config.otlp_endpoint, {config.otlp_tls_ca, config.otlp_tls_cert, config.otlp_tls_key},
      {Version(), HexText(*instance)});
  if (!sink.ok()) return sink.status();
  auto exporter =
      std::make_unique<SpanExporter>(SpanExporter::Options(), std::move(*sink), logger, clock);
  return std::make_unique<Tracer>(config.otlp_sample, seeds, std::move(exporter));
}

std::vector<prometheus::MetricFamily> ObservingFamilies(const AccessLog* log, Tracer* tracer) {
  AccessLog::Stats lines;
  if (log != nullptr) lines = log->stats();
  SpanExporter::Stats spans;
  if (tracer != nullptr) spans = tracer->exporter().stats();
  return {
      FamilyBy(kCounters, "attend_access_log_lines_total",
               "Access log lines: written, lost (to a full disk or a slow reader), or left out by "
               "its rate limit",
               "outcome",
               {{"written", lines.written}, {"lost", lines.lost}, {"limited", lines.limited}}),
      FamilyBy(
          kCounters, "attend_spans_total",
          "Spans of calls: exported, dropped (the collector was too slow), or failed (the "
          "collector did not accept them)",
          "outcome",
          {{"exported", spans.exported}, {"dropped", spans.dropped}, {"failed", spans.failed}})};
}

}  // namespace attend
