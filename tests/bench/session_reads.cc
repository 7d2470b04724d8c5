// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/session_reads.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "client/wire/message_codec.h"
#include "tests/bench/service/call_driver.h"
#include "tests/bench/service/report.h"
#include "tests/bench/service/serve.h"
#include "tests/bench/service/stream_driver.h"

namespace attend::bench {
namespace {

grpc::ByteBuffer BytesOf(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string TextOf(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!bytes.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// A step that reads `sequence`; its answer must equal the client library's.
std::shared_ptr<const PreparedCall> ReadOf(Sequence& sequence, const std::string& id) {
  client::AttentionCall step = sequence.Step();
  step.k = step.v = client::TensorRef();
  const client::AttentionResult result = Take(sequence.session().Attend(0, step), "a read");
  std::string right(reinterpret_cast<const char*>(result.o.data.get()),
                    static_cast<size_t>(result.o.bytes));
  v1::AttendRequest request = client::RequestHeader(step);
  request.clear_k();
  request.clear_v();
  request.set_request_id(id);
  v1::SessionUse& use = *request.add_sessions();
  use.set_session(sequence.session().id());
  use.set_length(sequence.context());
  request.add_raw(step.q.data, static_cast<size_t>(step.q.bytes));
  auto call = std::make_shared<PreparedCall>();
  call->request = BytesOf(request.SerializeAsString());
  call->verify = [right = std::move(right)](const grpc::ByteBuffer& answer,
                                            bool bytes_too) -> std::string {
    if (!bytes_too) return answer.Length() > right.size() ? "" : "a wrong length";
    v1::AttendResponse response;
    if (!response.ParseFromString(TextOf(answer)) || response.status().code() != 0) {
      return "a read failed: " + response.status().message();
    }
    return response.raw_size() == 1 && response.raw(0) == right ? "" : "a wrong answer";
  };
  return call;
}

// The length of an answer, which is the same for all steps.
int64_t AnswerBytes(Connections& connections, const PreparedCall& call) {
  return static_cast<int64_t>(
      Take(BlockingCaller(connections).Call(call.request), "a read").Length());
}

Contestant Measured(std::string name, const ServerProcess& server, Connections& connections,
                    const std::vector<StreamScripts>& scripts) {
  return {std::move(name), [&](double seconds) -> Result<Sample> {
            const double before = server.ProcessorSeconds();
            Result<Sample> sample = DriveStreams(connections, scripts, kReadStreams, seconds);
            if (!sample.ok()) return sample;
            sample->server_us = 1e6 * (server.ProcessorSeconds() - before) /
                                static_cast<double>(std::max<int64_t>(1, sample->calls));
            return sample;
          }};
}

double StepsPerSecond(const Sample& sample) { return sample.calls_per_second(); }
double ServerUs(const Sample& sample) { return sample.server_us; }

}  // namespace

ReadSamples MeasureReads(const ServerProcess& server,
                         const std::vector<std::unique_ptr<Sequence>>& sequences, int rounds,
                         double seconds) {
  std::vector<StreamScripts> reads(kReadStreams), echoes(kReadStreams);
  Connections connections(server.address(), kReadStreams);
  int64_t answer_bytes = 0;
  for (int n = 0; n < kReadStreams * kReadsInFlight; ++n) {
    const int stream = n / kReadsInFlight, slot = n % kReadsInFlight;
    const auto call = ReadOf(*sequences[static_cast<size_t>(n) % sequences.size()], StreamId(slot));
    if (n == 0) answer_bytes = AnswerBytes(connections, *call);
    auto echo = std::make_shared<PreparedCall>(*call);
    echo->verify = [answer_bytes](const grpc::ByteBuffer& answer, bool) -> std::string {
      return static_cast<int64_t>(answer.Length()) == answer_bytes ? "" : "a wrong length";
    };
    reads[static_cast<size_t>(stream)].push_back({call});
    echoes[static_cast<size_t>(stream)].push_back({std::move(echo)});
  }
  const auto echo = Take(ServerProcess::Start(ServeCommand(
                             "inline-echo", {"127.0.0.1:0", std::to_string(answer_bytes)})),
                         "inline echo");
  Connections to_echo(echo->address(), kReadStreams);
  const std::vector<Contestant> contestants = {Measured("attend", server, connections, reads),
                                               Measured("the inline echo", *echo, to_echo, echoes)};
  std::vector<Samples> samples = Take(RunRounds(contestants, rounds, seconds), "reads");
  return {std::move(samples[0]), std::move(samples[1])};
}

nlohmann::ordered_json ReadsJson(const ReadSamples& reads) {
  const auto side = [](const Samples& samples) -> nlohmann::ordered_json {
    return {{"per_second_rounds", Values(samples, StepsPerSecond)},
            {"server_us_rounds", Values(samples, ServerUs)}};
  };
  return {{"attend", side(reads.attend)}, {"echo", side(reads.echo)}};
}

void Print(const ReadSamples& reads) {
  std::vector<double> ratios = Values(reads.attend, StepsPerSecond);
  const std::vector<double> echoes = Values(reads.echo, StepsPerSecond);
  for (size_t n = 0; n < ratios.size(); ++n) ratios[n] /= echoes[n];
  std::printf(
      "reads of a raw client, %d streams with %d in flight: %.0f steps/s, %.1f us of the server;\n"
      "the inline echo %.0f, %.1f us; %.2f of it\n",
      kReadStreams, kReadsInFlight, Median(Values(reads.attend, StepsPerSecond)),
      Median(Values(reads.attend, ServerUs)), Median(echoes), Median(Values(reads.echo, ServerUs)),
      Median(ratios));
}

}  // namespace attend::bench
