// SPDX-License-Identifier: Apache-2.0
//
// The settings of addresses, connections and streams.

#include "server/app/config_group.h"
#include "server/app/config_values.h"

namespace attend {

namespace {

void AddConnections(Group& group, Config& c) {
  group.Int("--max-connections", c.max_connections, 0, 1 << 20,
            "gRPC connections at once; more are closed. 0: three quarters of the descriptors that "
            "the process may open, at most 16384");
  group.Int("--max-connections-per-peer", c.max_connections_per_peer, 0, 1 << 20,
            "Of one IPv4 address, one /64 network of IPv6, or one user of Unix sockets. 0: a "
            "quarter of --max-connections");
  const auto seconds = [&group](const char* flag, double& value, const char* help) {
    group.Add(flag, value, help)->check(InRange(0.001, 86400.0))->type_name("SECONDS");
  };
  seconds("--handshake-timeout", c.handshake_timeout_seconds,
          "Seconds in which a connection must send its first byte, and again those in which it "
          "must have become one of HTTP/2");
  seconds("--connection-idle-timeout", c.connection_idle_timeout_seconds,
          "Seconds after which a connection without calls is closed; clients connect again");
  group
      .Int("--keepalive-time", c.keepalive_time_seconds, 1, 32767,
           "Seconds of silence after which TCP asks whether a client's machine is there")
      ->type_name("SECONDS");
  group
      .Int("--keepalive-timeout", c.keepalive_timeout_seconds, 1, 32767,
           "Seconds that it then has to answer, and that sent bytes may stay unacknowledged")
      ->type_name("SECONDS");
  group.Text("--socket-mode", c.socket_mode, "MODE", CheckSocketMode,
             "Octal mode of the files of --listen unix:PATH; 0600, or 0660 with --socket-group");
  group.Text("--socket-group", c.socket_group, "GROUP", nullptr,
             "Group of these files, by name or number; empty: the process's");
}

}  // namespace

void AddNetwork(CLI::App& app, Config& c) {
  Group group(app, "Network");
  group
      .Add("--listen", c.listen,
           "Where to serve gRPC: HOST:PORT (port 0: any free one) or unix:PATH. Several, separated "
           "by commas or given one by one")
      ->type_name("ADDR")
      ->delimiter(',')
      ->expected(1, 64)
      ->default_str(c.listen.front())
      ->check(CLI::Validator(CheckAddress, "", ""));
  group.Text("--metrics-listen", c.metrics_listen, "ADDR", CheckMetricsAddress,
             "Where to serve Prometheus metrics under /metrics; off: nowhere");
  AddConnections(group, c);
  group.Int("--max-streams", c.max_streams, 1, 1 << 20,
            "Calls at once on one connection; more wait in the client. No more than one peer may "
            "have");
  group.Int(
      "--max-calls", c.max_calls, 0, 1 << 24,
      "Open calls of all connections, idle streams too. Connections that open more are closed. "
      "0: 16 times --max-streams");
  group.Int(
      "--max-calls-per-peer", c.max_calls_per_peer, 0, 1 << 24,
      "Those of one peer's connections, at most 7/8 of all. 0: a quarter of all, and no fewer "
      "than --max-streams");
  group.Int("--stream-requests-max", c.stream_requests_max, 1, 1 << 20,
            "Unanswered requests of one AttendStream before the server stops reading it");
  group.Int("--chunked-streams-max", c.chunked_streams_max, 1, 1024,
            "Streams of one AttendChunked request, over its life");
  group
      .Add("--chunked-idle-timeout", c.chunked_idle_timeout_seconds,
           "Seconds in which an AttendChunked request must bring 64 KiB and 1/16 of its bytes")
      ->check(InRange(0.001, 86400.0))
      ->type_name("SECONDS");
  app.add_flag("--reflection,!--no-reflection", c.reflection,
               "Tell clients what services there are (grpc.reflection.v1alpha)")
      ->group("Network")
      ->envname("ATTEND_REFLECTION")
      ->default_str("true");
  group
      .Add("--write-timeout", c.write_timeout_seconds,
           "Seconds in which a client must take 1 MiB of its answer, or the sixteenth part if that "
           "is more; else its call is cancelled and the memory serves others. 0: no bound")
      ->check(InRange(0.0, 86400.0))
      ->type_name("SECONDS");
  group.Text("--ready-file", c.ready_file, "PATH", nullptr,
             "Once serving, write {\"pid\", \"listen\", \"metrics\"} here as JSON");
}

}  // namespace attend
