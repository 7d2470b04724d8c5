// SPDX-License-Identifier: Apache-2.0
//
// Settings for addresses, connections and streams.

#include "server/app/config_group.h"
#include "server/app/config_values.h"
#include "server/app/unix_address.h"
#include "server/net/tcp_listener.h"

namespace attend {

namespace {

void AddConnections(Group& group, Config& c) {
  group.Int("--max-connections", c.max_connections, 0, 1 << 20,
            "Concurrent gRPC connections; further ones are closed. 0: three quarters of the "
            "descriptors that the process may open, less those reserved for connections to shared "
            "memory, at most 16384");
  group.Int("--max-connections-per-peer", c.max_connections_per_peer, 0, 1 << 20,
            "Concurrent connections of one peer: an IPv4 address, an IPv6 /64 network, or a user "
            "of Unix sockets. 0: a quarter of --max-connections");
  const auto seconds = [&group](const char* flag, double& value, const char* help) {
    group.Number(flag, value, 0.001, 86400, "SECONDS", help);
  };
  seconds("--handshake-timeout", c.handshake_timeout_seconds,
          "Seconds in which a connection must complete the TLS handshake, and then again to send "
          "its first HTTP/2 frame");
  seconds("--first-call-timeout", c.first_call_timeout_seconds,
          "With --tokens: seconds after which a connection is closed if no call on it has been "
          "accepted; health checks do not count. 64 KiB of messages or an open health watch extend "
          "it by as much again");
  seconds("--message-timeout", c.message_timeout_seconds,
          "Seconds in which a message that has begun must deliver 4 KiB, or its end, while the "
          "server reads it or the client takes no answers, or its connection 4 KiB for each "
          "message that has begun; otherwise the connection is closed");
  seconds(
      "--connection-idle-timeout", c.connection_idle_timeout_seconds,
      "Seconds after which a connection without calls is closed; clients reconnect automatically");
  group.Number(
      "--max-connection-age", c.max_connection_age_seconds, 0, 86400, "SECONDS",
      "Seconds, plus or minus a tenth, after which a connection accepts no new calls; open calls "
      "continue, and clients reconnect, so that they also find servers added since. 0: no limit");
  group.Number(
      "--keepalive-time", c.keepalive_time_seconds, 1, 32767, "SECONDS",
      "Idle seconds after which TCP probes whether the client's machine is still reachable");
  group.Number(
      "--keepalive-timeout", c.keepalive_timeout_seconds, 1, 32767, "SECONDS",
      "Seconds that the machine then has to answer, and that sent bytes may remain unacknowledged");
  group.Text("--socket-mode", c.socket_mode, "MODE", CheckSocketMode,
             "Octal mode of the socket files of --listen unix:PATH. Empty: 0600, or 0660 with "
             "--socket-group");
  group.Text("--socket-group", c.socket_group, "GROUP", nullptr,
             "Group of these socket files, by name or number. Empty: the process's group");
  group
      .Add("--socket-users", c.socket_users,
           "Users that may connect to these sockets, by name or number, regardless of the files' "
           "mode. Separate several by commas or repeat the flag. Empty: those that the mode admits")
      ->type_name("USER")
      ->delimiter(',')
      ->expected(0, 1024)
      ->default_str("");
}

void AddFleet(Group& group, Config& c) {
  group.Text("--server-id", c.server_id, "NAME", CheckServerId,
             "Name sent with every answer in the metadata attend-server-id, so that clients of "
             "several servers know which one answered. Empty: 16 random hexadecimal digits");
  group.Flag("--load-reports", c.load_reports,
             "Report the server's load with every answer (ORCA), for clients that balance over "
             "several servers by it");
}

// ATTEND_TLS_CERT and ATTEND_TLS_KEY are the client's certificate. Both programs may run in one
// environment, e.g. a health check in a container, so the server's have other names.
constexpr char kCertVariable[] = "ATTEND_LISTEN_TLS_CERT";
constexpr char kKeyVariable[] = "ATTEND_LISTEN_TLS_KEY";

void AddTls(Group& group, Config& c) {
  group
      .Text("--tls-cert", c.tls_cert, "FILE", nullptr,
            "Certificate of the server, followed by its chain, in PEM: the TCP addresses of "
            "--listen then accept only TLS 1.2 and 1.3. Reloaded when it changes, as are the files "
            "below. Empty: no TLS")
      ->envname(kCertVariable);
  group.Text("--tls-key", c.tls_key, "FILE", nullptr, "Private key of --tls-cert, in PEM")
      ->envname(kKeyVariable);
  group.Text(
      "--tls-client-ca", c.tls_client_ca, "FILE", nullptr,
      "Authorities, in PEM, that sign client certificates (mTLS). Empty: clients present none");
  group.Text("--tls-client-cert", c.tls_client_cert, "MODE", OneOf({"require", "allow"}),
             "With --tls-client-ca: require a certificate of every client, or allow clients "
             "without one");
  group.Text("--tls-crl", c.tls_crl, "PATH", nullptr,
             "File or folder of revocation lists, in PEM, one for each authority of "
             "--tls-client-ca. Empty: nothing is revoked");
  group.Flag("--insecure", c.insecure,
             "Listen beyond loopback without TLS: anyone on the network may call, and read and "
             "change what others send");
}

void AddMetricsAccess(Group& group, Config& c) {
  group.Text("--metrics-tls-cert", c.metrics_tls_cert, "PATH", nullptr,
             "PEM file of the certificate and its chain for TLS on --metrics-listen. Reloaded when "
             "it changes. Empty: no TLS");
  group.Text("--metrics-tls-key", c.metrics_tls_key, "PATH", nullptr,
             "PEM file of its key, without a password");
  group.Text("--metrics-auth", c.metrics_auth, "PATH", nullptr,
             "Callers that may read /metrics: a file in the format of --tokens, whose callers need "
             "the scope info and send their token as bearer, or as password with their name. "
             "Reloaded when it changes. Empty: anyone; beyond loopback, the callers of --tokens");
}

void CheckMetricsAccess(const Config& c) {
  CheckPair("--metrics-tls-cert", c.metrics_tls_cert, "--metrics-tls-key", c.metrics_tls_key);
  const bool listens = c.metrics_listen != "off";
  CheckNeeds("--metrics-tls-cert", !c.metrics_tls_cert.empty(), listens, "--metrics-listen");
  CheckNeeds("--metrics-auth", !c.metrics_auth.empty(), listens, "--metrics-listen");
  if (!listens || IsLocalOrNowhere(c.metrics_listen)) return;
  const MetricsAccess access = MetricsAccessOf(c);
  if (!access.loopback_only) return;
  const std::string beyond = c.metrics_listen + " is beyond loopback and must ";
  constexpr char kInsecure[] = ", or --insecure if anyone on the network may read it";
  throw CLI::ValidationError(
      "--metrics-listen",
      (access.tls.cert.empty()
           ? beyond +
                 "be encrypted: give --metrics-tls-cert and --metrics-tls-key, or --tls-cert and "
                 "--tls-key"
           : beyond + "authenticate readers: give --metrics-auth or --tokens") +
          kInsecure);
}

}  // namespace

bool IsLocalOrNowhere(const std::string& address) {
  const Result<bool> loopback = IsLoopback(address);
  return !loopback.ok() || *loopback;
}

MetricsAccess MetricsAccessOf(const Config& c) {
  MetricsAccess access;
  access.tls.cert = c.metrics_tls_cert;
  access.tls.key = c.metrics_tls_key;
  access.auth = c.metrics_auth;
  const Result<bool> loopback = IsLoopback(c.metrics_listen);
  const bool beyond = !loopback.ok() || !*loopback;
  if (beyond && access.tls.cert.empty()) access.tls = {c.tls_cert, c.tls_key, "tls"};
  if (beyond && access.auth.empty() && !c.insecure) access.auth = c.tokens;
  access.loopback_only = !c.insecure && (access.tls.cert.empty() || access.auth.empty());
  return access;
}

bool TcpOfLoopbackOnly(const Config& c) {
  return c.tls_cert.empty() && !(c.insecure && c.tokens.empty());
}

void CheckNetwork(const Config& c) {
  CheckPair("--tls-cert", c.tls_cert, "--tls-key", c.tls_key);
  CheckNeeds("--tls-client-ca", !c.tls_client_ca.empty(), !c.tls_cert.empty(),
             "--tls-cert and --tls-key");
  CheckNeeds("--tls-crl", !c.tls_crl.empty(), !c.tls_client_ca.empty(),
             "--tls-client-ca, whose clients it revokes");
  const Status sockets = CheckTenantsSockets(c);
  if (!sockets.ok()) throw CLI::ValidationError("--listen", sockets.message());
  CheckMetricsAccess(c);
  if (c.insecure || !c.tls_cert.empty()) return;
  for (const std::string& address : c.listen) {
    if (address.starts_with("unix:") || IsLocalOrNowhere(address)) continue;
    throw CLI::ValidationError("--listen",
                               address +
                                   " is beyond loopback and must be encrypted: give --tls-cert and "
                                   "--tls-key, or --insecure if anyone on the network may call");
  }
}

void AddNetwork(CLI::App& app, Config& c) {
  Group group(app, "Network");
  group
      .Add("--listen", c.listen,
           "Address of the gRPC service: HOST:PORT (port 0: any free port), unix:PATH, or "
           "unix:PATH?tenant=NAME, whose callers belong to that tenant; &users=A:B, &mode=MODE and "
           "&group=GROUP then override --socket-users, --socket-mode and --socket-group for it. "
           "Separate several by commas or repeat the flag. Beyond loopback it needs --tls-cert")
      ->type_name("ADDR")
      ->delimiter(',')
      ->expected(1, 64)
      ->default_str(c.listen.front())
      ->check(CLI::Validator(CheckAddress, "", ""));
  group.Text("--metrics-listen", c.metrics_listen, "ADDR", CheckMetricsAddress,
             "Address of /metrics for Prometheus, and of /healthz and /readyz for probes; \"off\" "
             "disables it");
  AddMetricsAccess(group, c);
  AddConnections(group, c);
  AddFleet(group, c);
  AddTls(group, c);
  group.Int("--max-streams", c.max_streams, 1, 1 << 20,
            "Concurrent calls on one connection, at most --max-calls-per-peer; further ones wait "
            "in the client");
  group.Int("--max-calls", c.max_calls, 0, 1 << 24,
            "Open calls of all connections together, idle streams included. A connection that "
            "opens more is closed. 0: 16 times --max-streams");
  group.Int("--max-calls-per-peer", c.max_calls_per_peer, 0, 1 << 24,
            "Open calls of one peer's connections together, at most 7/8 of --max-calls. 0: a "
            "quarter of it, but no fewer than --max-streams");
  group.Int("--stream-requests-max", c.stream_requests_max, 1, 1 << 20,
            "Unanswered requests of one AttendStream at which the server stops reading from it");
  group.Int("--chunked-streams-max", c.chunked_streams_max, 1, 1024,
            "Streams that one AttendChunked request may use over its lifetime");
  group.Number(
      "--chunked-idle-timeout", c.chunked_idle_timeout_seconds, 0.001, 86400, "SECONDS",
      "Seconds in which an AttendChunked request must deliver 64 KiB and 1/16 of its bytes");
  group.Gone("--server-transport", "there is one transport");
  group.Flag("--reflection", c.reflection,
             "Serve gRPC reflection (grpc.reflection.v1 and v1alpha), which lists the services");
  group.Number("--write-timeout", c.write_timeout_seconds, 0, 86400, "SECONDS",
               "Seconds in which a client must take 1 MiB of its answer, or 1/16 of it if that is "
               "more; otherwise its call is cancelled and the memory freed. 0: no limit");
  group.Text(
      "--ready-file", c.ready_file, "PATH", nullptr,
      "Write {\"pid\", \"listen\", \"metrics\"} as JSON to this file once the server is serving");
}

}  // namespace attend
