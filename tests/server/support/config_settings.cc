// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/config_settings.h"

#include <cstdint>

namespace attend::test {
namespace {

std::vector<Setting> ConnectionSettings() {
  using C = Config;
  return {
      {"max-connections", "70", [](const C& c) { return c.max_connections == 70; }, "-1"},
      {"max-connections-per-peer", "8", [](const C& c) { return c.max_connections_per_peer == 8; },
       "-1"},
      {"max-calls", "9", [](const C& c) { return c.max_calls == 9; }, "-1"},
      {"handshake-timeout", "1.5", [](const C& c) { return c.handshake_timeout_seconds == 1.5; },
       "0"},
      {"first-call-timeout", "7.5", [](const C& c) { return c.first_call_timeout_seconds == 7.5; },
       "0"},
      {"message-timeout", "3.5", [](const C& c) { return c.message_timeout_seconds == 3.5; }, "0"},
      {"connection-idle-timeout", "2.5",
       [](const C& c) { return c.connection_idle_timeout_seconds == 2.5; }, "0"},
      {"max-connection-age", "1.5", [](const C& c) { return c.max_connection_age_seconds == 1.5; },
       "-1"},
      {"server-id", "attend-0.attend", [](const C& c) { return c.server_id == "attend-0.attend"; },
       "a b"},
      {"keepalive-time", "3", [](const C& c) { return c.keepalive_time_seconds == 3; }, "0"},
      {"keepalive-timeout", "4", [](const C& c) { return c.keepalive_timeout_seconds == 4; }, "0"},
      {"socket-mode", "0666", [](const C& c) { return c.socket_mode == "0666"; }, "0400"},
      {"socket-group", "7", [](const C& c) { return c.socket_group == "7"; }, ""},
      {"tokens", "/etc/t", [](const C& c) { return c.tokens == "/etc/t"; }, ""},
  };
}

std::vector<Setting> MemorySettings() {
  using C = Config;
  return {
      {"listen", "127.0.0.1:9,unix:/tmp/s",
       [](const C& c) {
         return c.listen == std::vector<std::string>{"127.0.0.1:9", "unix:/tmp/s"};
       },
       "localhost"},
      {"metrics-listen", "off", [](const C& c) { return c.metrics_listen == "off"; }, "unix:/x"},
      {"max-calls-per-peer", "9", [](const C& c) { return c.max_calls_per_peer == 9; }, "-1"},
      {"max-streams", "7", [](const C& c) { return c.max_streams == 7; }, "0"},
      {"stream-requests-max", "9", [](const C& c) { return c.stream_requests_max == 9; }, "-1"},
      {"chunked-streams-max", "3", [](const C& c) { return c.chunked_streams_max == 3; }, "0"},
      {"chunked-idle-timeout", "2.5",
       [](const C& c) { return c.chunked_idle_timeout_seconds == 2.5; }, "0"},
      {"write-timeout", "1.5", [](const C& c) { return c.write_timeout_seconds == 1.5; }, "-1"},
      {"ready-file", "/tmp/r", [](const C& c) { return c.ready_file == "/tmp/r"; }, ""},
      {"device", "cuda:0,1", [](const C& c) { return c.device == "cuda:0,cuda:1"; }, "gpu"},
      {"lanes", "3", [](const C& c) { return c.lanes == 3; }, "65"},
      {"cpu-threads", "5", [](const C& c) { return c.cpu_threads == 5; }, "many"},
      {"lane-workspace", "1MiB", [](const C& c) { return c.lane_workspace_bytes == 1 << 20; },
       "1Q"},
      {"staging-max", "0", [](const C& c) { return c.staging_max_bytes == 0; }, "-1"},
      {"staging-min", "1MiB", [](const C& c) { return c.staging_min_bytes == 1 << 20; }, "0"},
      {"max-request-bytes", "64 KiB", [](const C& c) { return c.max_request_bytes == 65536; },
       "2GiB"},
      {"memory-budget", "1.5GiB", [](const C& c) { return c.memory_budget_bytes == 3 << 29; },
       "-1"},
      {"receive-memory", "0", [](const C& c) { return c.receive_memory_bytes == 0; }, "-1"},
      {"message-memory-max", "5GiB",
       [](const C& c) { return c.message_memory_max_bytes == int64_t{5} << 30; }, "3GiB"},
      {"max-queue", "11", [](const C& c) { return c.max_queue == 11; }, "0"},
      {"shared-memory-socket", "/tmp/m",
       [](const C& c) { return c.shared_memory_socket == "/tmp/m"; }, ""},
      {"shared-memory-max", "2GiB",
       [](const C& c) { return c.shared_memory_max_bytes == int64_t{2} << 30; }, "0"},
      {"shared-memory-client-max", "8KiB",
       [](const C& c) { return c.shared_memory_client_max_bytes == 8192; }, "4095"},
      {"shared-memory-client-regions", "9",
       [](const C& c) { return c.shared_memory_client_regions == 9; }, "0"},
      {"oip-shared-memory-regions", "7",
       [](const C& c) { return c.oip_shared_memory_regions == 7; }, "0"},
      {"oip-shared-memory-bytes", "64MiB",
       [](const C& c) { return c.oip_shared_memory_bytes == 64 << 20; }, "0"},
      {"session-memory", "8MiB", [](const C& c) { return c.session_memory_bytes == 8 << 20; },
       "8388607B"},
      {"session-lease", "2.5", [](const C& c) { return c.session_lease_seconds == 2.5; }, "0"},
      {"max-sessions", "8", [](const C& c) { return c.max_sessions == 8; }, "0"},
  };
}

std::vector<Setting> WorkSettings() {
  using C = Config;
  return {
      {"max-batch-requests", "12", [](const C& c) { return c.max_batch_requests == 12; }, "0"},
      {"max-batch-gflop", "2.5", [](const C& c) { return c.max_batch_gflop == 2.5; }, "nan"},
      {"max-batch-bytes", "1K", [](const C& c) { return c.max_batch_bytes == 1024; }, "0"},
      {"max-batch-delay-us", "13", [](const C& c) { return c.max_batch_delay_us == 13; }, "1.5"},
      {"tenant", "a=2,default=3",
       [](const C& c) {
         return c.tenants.weights() == std::vector<int32_t>{3, 2} && c.tenants.Find("a") == 1;
       },
       "a=0"},
      {"priority-aging-ms", "14", [](const C& c) { return c.priority_aging_ms == 14; }, "0"},
      {"reference-check", "sample:0.25", [](const C& c) { return c.check_sample == 0.25; },
       "sample:1.5"},
      {"check-seed", "18446744073709551615", [](const C& c) { return c.check_seed == UINT64_MAX; },
       "-1"},
      {"check-threads", "2", [](const C& c) { return c.check_threads == 2; }, "0"},
      {"max-checks", "5", [](const C& c) { return c.max_checks == 5; }, "0"},
      {"max-request-gflop", "0.5", [](const C& c) { return c.max_request_gflop == 0.5; }, "-1"},
      {"check-dump-dir", "/tmp/d", [](const C& c) { return c.check_dump_dir == "/tmp/d"; }, ""},
      {"check-dump-max", "4", [](const C& c) { return c.check_dump_max == 4; }, "-4"},
      {"check-dump-interval", "2.5",
       [](const C& c) { return c.check_dump_interval_seconds == 2.5; }, "-1"},
      {"copy-threads", "6", [](const C& c) { return CopyThreads(c) == 6; }, "257"},
      {"drain-timeout", "1.5", [](const C& c) { return c.drain_timeout_seconds == 1.5; }, "-1"},
      {"log-level", "debug", [](const C& c) { return c.log_level == "debug"; }, "loud"},
      {"log-format", "json", [](const C& c) { return c.log_format == "json"; }, "xml"},
      {"log-file", "/tmp/l", [](const C& c) { return c.log_file == "/tmp/l"; }, ""},
      {"log-rate", "0.5", [](const C& c) { return c.log_rate == 0.5; }, "-1"},
  };
}

std::vector<Setting> ObservingSettings() {
  using C = Config;
  return {
      {"access-log", "/tmp/a", [](const C& c) { return c.access_log == "/tmp/a"; }, ""},
      {"access-log-sample", "0.25", [](const C& c) { return c.access_log_sample == 0.25; }, "1.5"},
      {"access-log-slow", "0.5", [](const C& c) { return c.access_log_slow_seconds == 0.5; }, "-1"},
      {"access-log-rate", "7", [](const C& c) { return c.access_log_rate == 7; }, "-1"},
      {"otlp-endpoint", "localhost:4317",
       [](const C& c) { return c.otlp_endpoint == "localhost:4317"; }, "localhost"},
      {"otlp-sample", "0.5", [](const C& c) { return c.otlp_sample == 0.5; }, "2"},
  };
}

std::vector<Setting> EncryptionSettings() {
  using C = Config;
  const std::vector<std::string> tls = {"--tls-cert=c", "--tls-key=k"};
  std::vector<std::string> mtls = tls;
  mtls.emplace_back("--tls-client-ca=a");
  return {
      {"tls-cert",
       "/c",
       [](const C& c) { return c.tls_cert == "/c"; },
       "",
       {"--tls-key=k"},
       "ATTEND_LISTEN_TLS_CERT"},
      {"tls-key",
       "/k",
       [](const C& c) { return c.tls_key == "/k"; },
       "",
       {"--tls-cert=c"},
       "ATTEND_LISTEN_TLS_KEY"},
      {"tls-client-ca", "/a", [](const C& c) { return c.tls_client_ca == "/a"; }, "", tls},
      {"tls-client-cert", "allow", [](const C& c) { return c.tls_client_cert == "allow"; }, "ask"},
      {"tls-crl", "/r", [](const C& c) { return c.tls_crl == "/r"; }, "", mtls},
      {"metrics-tls-cert",
       "/c",
       [](const C& c) { return c.metrics_tls_cert == "/c"; },
       "",
       {"--metrics-tls-key=k"}},
      {"metrics-tls-key",
       "/k",
       [](const C& c) { return c.metrics_tls_key == "/k"; },
       "",
       {"--metrics-tls-cert=c"}},
      {"metrics-auth", "/t", [](const C& c) { return c.metrics_auth == "/t"; }, ""},
  };
}

}  // namespace

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const std::vector<Setting>& each : {ConnectionSettings(), MemorySettings(), WorkSettings(),
                                           ObservingSettings(), EncryptionSettings()}) {
    settings.insert(settings.end(), each.begin(), each.end());
  }
  return settings;
}

}  // namespace attend::test
