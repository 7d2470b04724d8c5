// SPDX-License-Identifier: Apache-2.0
//
// All settings of attend-server with their defaults. Flags override the config file, which
// overrides the environment.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/limits/tenant_bounds.h"
#include "server/schedule/tenants.h"

namespace attend {

struct Config {
  // Network
  std::vector<std::string> listen = {"127.0.0.1:8001"};
  std::string metrics_listen = "127.0.0.1:8002";  // "off": none
  int64_t max_streams = 1024;                     // per connection
  int64_t max_calls = 0;                          // on all connections; 0: 16 * max_streams
  int64_t max_calls_per_peer = 0;                 // 0: max_calls / 4, at least max_streams
  int64_t max_connections = 0;                    // 0: as many as descriptors allow
  int64_t max_connections_per_peer = 0;           // 0: a quarter of max_connections
  double handshake_timeout_seconds = 20;
  double first_call_timeout_seconds = 60;
  double message_timeout_seconds = 60;
  double connection_idle_timeout_seconds = 600;
  double max_connection_age_seconds = 0;  // 0: unbounded
  int64_t keepalive_time_seconds = 60;
  int64_t keepalive_timeout_seconds = 20;
  std::string socket_mode;   // octal; empty: 0600, or 0660 with a group
  std::string socket_group;  // empty: the process's group
  // Names or numbers; empty: any that the file's mode allows.
  std::vector<std::string> socket_users;
  bool insecure = false;  // plaintext TCP beyond loopback
  std::string tls_cert;   // empty: plaintext TCP
  std::string tls_key;
  std::string tls_client_ca;  // empty: no client certificates
  std::string tls_client_cert = "require";
  std::string tls_crl;  // a file or a folder; empty: none
  bool reflection = true;
  int64_t stream_requests_max = 64;
  int64_t chunked_streams_max = 16;
  double chunked_idle_timeout_seconds = 30;
  double write_timeout_seconds = 20;  // 0: none
  std::string ready_file;
  std::string server_id;      // empty: random
  bool load_reports = false;  // with every answer
  // For metrics_listen. Empty: no TLS; no authentication.
  std::string metrics_tls_cert;
  std::string metrics_tls_key;
  std::string metrics_auth;

  // Callers
  std::string tokens;  // a file; empty: callers are not authenticated

  // Devices
  std::string device = "auto";
  int64_t lanes = 0;
  int64_t cpu_threads = 0;
  int64_t lane_workspace_bytes = int64_t{256} << 20;
  int64_t staging_max_bytes = int64_t{4} << 30;
  int64_t staging_min_bytes = int64_t{4} << 20;

  // Limits
  int64_t receive_memory_bytes = int64_t{1} << 30;
  int64_t max_request_bytes = int64_t{1} << 30;
  int64_t memory_budget_bytes = int64_t{4} << 30;
  int64_t message_memory_max_bytes = 0;  // 0: unbounded
  int64_t max_queue = 1024;
  double max_request_gflop = -1;  // negative: ten minutes of the device; 0: unbounded

  // Shared memory
  bool shared_memory = false;
  std::string shared_memory_socket;  // empty: DefaultSocketPath()
  int64_t shared_memory_max_bytes = int64_t{4} << 30;
  int64_t shared_memory_client_max_bytes = int64_t{1} << 30;
  int64_t shared_memory_client_regions = 64;
  bool shared_memory_any_user = false;
  bool cuda_ipc = false;

  // Open Inference Protocol
  bool oip = false;
  std::string oip_shared_memory;        // a prefix of keys; empty: off
  std::string oip_shared_memory_owner;  // empty: the process's user
  int64_t oip_shared_memory_regions = 256;
  int64_t oip_shared_memory_bytes = int64_t{1} << 30;
  bool oip_cuda_shared_memory = false;

  // Sessions
  int64_t session_memory_bytes = 0;        // per device
  bool session_memory_is_default = false;  // then a GPU's depends on its memory
  double session_lease_seconds = 60;
  int64_t max_sessions = 65536;

  // Batches
  int64_t max_batch_requests = 64;
  double max_batch_gflop = 0;
  int64_t max_batch_bytes = int64_t{64} << 20;
  int64_t max_batch_delay_us = 0;

  // Fairness
  Tenants tenants;
  std::string limits_file;           // empty: no per-tenant limits
  std::vector<TenantBounds> limits;  // from limits_file, by tenant; empty: no file
  int64_t priority_aging_ms = 1000;

  // Checks
  std::string reference_check = "off";
  double check_sample = 0;  // from reference_check: 0 off, 1 all
  uint64_t check_seed = 1;
  int64_t check_threads = 1;
  int64_t max_checks = 256;
  std::string check_dump_dir;
  int64_t check_dump_max = 100;
  double check_dump_interval_seconds = 60;

  // Process
  int64_t copy_threads = 0;  // 0: the default
  double drain_timeout_seconds = 30;
  std::string log_level = "info";
  std::string log_format = "text";
  std::string log_file;  // empty: stderr
  double log_rate = 1;   // lines per second of each kind of warning; 0: unlimited
  bool allocator_tuning = true;
  bool core_dumps = false;

  // Access log
  std::string access_log = "off";  // a file, or stderr
  double access_log_sample = 1;
  double access_log_slow_seconds = 1;
  // Lines per second of ordinary calls, and of the others; 0: unlimited.
  double access_log_rate = 1000;

  // Traces
  std::string otlp_endpoint;  // empty: off; https://HOST:PORT, HOST:PORT or unix:PATH
  std::string otlp_tls_ca;    // empty: the system's
  std::string otlp_tls_cert;
  std::string otlp_tls_key;
  double otlp_sample = 0;  // share of calls that their clients do not trace
};

enum class ConfigOutcome { kRun, kPrinted, kError };

// kPrinted: --help or --version; `text` goes to stdout. kError: `text` is one line for stderr, the
// exit code is 2. Reads the environment.
ConfigOutcome ParseConfig(int argc, const char* const* argv, Config& config, std::string& text);

// Limits that depend on several settings.
int64_t DefaultMemoryBudget(int64_t memory_bytes);
int64_t DefaultMessageMemoryMax(const Config& config);
// Maximum numbers of open calls: in total, per peer (always less than all), and per connection.
int64_t MaxCalls(const Config& config);
int64_t MaxCallsPerPeer(const Config& config);
int64_t MaxStreams(const Config& config);
int CopyThreads(const Config& config);

// The TLS files of metrics_listen. Empty: plaintext.
struct MetricsTlsFiles {
  std::string cert;
  std::string key;
  std::string settings = "metrics-tls";  // prefix of the settings that name them
};
// Access to metrics_listen: its own settings, or beyond loopback the server's.
struct MetricsAccess {
  MetricsTlsFiles tls;
  std::string auth;            // empty: anyone who can connect
  bool loopback_only = false;  // it must not listen elsewhere
};
MetricsAccess MetricsAccessOf(const Config& config);
// Whether gRPC over TCP must listen on loopback only.
bool TcpOfLoopbackOnly(const Config& config);
// Whether only this host reaches HOST:PORT, or the name does not resolve, so nothing can listen
// there.
bool IsLocalOrNowhere(const std::string& address);

// "attend-server 0.1.0 (gcc 12.2.0, Release, CUDA none)"
std::string VersionText();
// "gcc 12.2.0, Release, CUDA none"
std::string BuildText();
const char* Version();

}  // namespace attend
