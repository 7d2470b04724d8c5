// SPDX-License-Identifier: Apache-2.0
//
// Settings for addresses, connections and streams.

#include "server/app/config_group.h"
#include "server/app/config_values.h"

namespace attend {

namespace {

void AddConnections(Group& group, Config& c) {
  group.Int("--max-connections", c.max_connections, 0, 1 << 20,
            "Concurrent gRPC connections; further ones are closed. 0: three quarters of the "
            "descriptors that the process may open, at most 16384");
  group.Int("--max-connections-per-peer", c.max_connections_per_peer, 0, 1 << 20,
            "Concurrent connections of one peer: an IPv4 address, an IPv6 /64 network, or a user "
            "of Unix sockets. 0: a quarter of --max-connections");
  const auto seconds = [&group](const char* flag, double& value, const char* help) {
    group.Number(flag, value, 0.001, 86400, "SECONDS", help);
  };
  seconds("--handshake-timeout", c.handshake_timeout_seconds,
          "Seconds in which a connection must send its first byte, and then again to complete the "
          "HTTP/2 handshake");
  seconds(
      "--connection-idle-timeout", c.connection_idle_timeout_seconds,
      "Seconds after which a connection without calls is closed; clients reconnect by themselves");
  group.Number(
      "--keepalive-time", c.keepalive_time_seconds, 1, 32767, "SECONDS",
      "Seconds of silence after which TCP probes whether the client's machine is still there");
  group.Number("--keepalive-timeout", c.keepalive_timeout_seconds, 1, 32767, "SECONDS",
               "Seconds that the machine then has to answer, and that sent bytes may stay "
               "unacknowledged");
  group.Text("--socket-mode", c.socket_mode, "MODE", CheckSocketMode,
             "Octal mode of the socket files of --listen unix:PATH. Empty: 0600, or 0660 with "
             "--socket-group");
  group.Text("--socket-group", c.socket_group, "GROUP", nullptr,
             "Group of these socket files, by name or number. Empty: the process's group");
}

}  // namespace

void AddNetwork(CLI::App& app, Config& c) {
  Group group(app, "Network");
  group
      .Add("--listen", c.listen,
           "Address of the gRPC service: HOST:PORT (port 0: any free port) or unix:PATH. Separate "
           "several by commas or repeat the flag")
      ->type_name("ADDR")
      ->delimiter(',')
      ->expected(1, 64)
      ->default_str(c.listen.front())
      ->check(CLI::Validator(CheckAddress, "", ""));
  group.Text("--metrics-listen", c.metrics_listen, "ADDR", CheckMetricsAddress,
             "Address of the Prometheus endpoint (/metrics); \"off\" disables it");
  AddConnections(group, c);
  group.Int("--max-streams", c.max_streams, 1, 1 << 20,
            "Concurrent calls on one connection, at most those of one peer (--max-calls-per-peer); "
            "further ones wait in the client");
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
  group.Flag("--reflection", c.reflection,
             "Serve gRPC reflection (grpc.reflection.v1alpha), which lists the services");
  group.Number("--write-timeout", c.write_timeout_seconds, 0, 86400, "SECONDS",
               "Seconds in which a client must take 1 MiB of its answer, or 1/16 of it if that is "
               "more; otherwise its call is cancelled and the memory freed. 0: no limit");
  group.Text(
      "--ready-file", c.ready_file, "PATH", nullptr,
      "Write {\"pid\", \"listen\", \"metrics\"} as JSON to this file once the server is serving");
}

}  // namespace attend
