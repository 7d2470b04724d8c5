// SPDX-License-Identifier: Apache-2.0
//
// The row about TLS: compared with bare gRPC with TLS, and with the server without TLS.

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/service/rows.h"
#include "tests/server/support/self_signed.h"

namespace attend::bench {
namespace {

constexpr char kBare[] = "bare gRPC over TLS";
constexpr char kPlain[] = "our own without TLS";

// The certificate of both servers, which their clients trust.
class Certificate {
 public:
  Status Make() {
    Result<KeyAndCertificate> made = MakeSelfSigned(kTlsName);
    if (!made.ok()) return made.status();
    text_ = made->certificate;
    std::ofstream(cert()) << made->certificate;
    std::ofstream(key()) << made->key;
    return Status();
  }
  const std::string& text() const { return text_; }
  std::string cert() const { return folder_.Path("cert.pem"); }
  std::string key() const { return folder_.Path("key.pem"); }

 private:
  const TempFolder folder_;
  std::string text_;
};

// A work, the kind of server, and the unit of its rate.
struct Load {
  std::shared_ptr<Work> work;
  Serves serves;
  int connections;
  int in_flight;  // on all connections
  Target target;
  const char* unit;
  double (*rate)(const Sample& sample);
};

Question QuestionOf(const Load& load, const char* against) {
  Question question{"tls",
                    load.work->name() + ", " + std::to_string(load.connections) + " connections, " +
                        std::to_string(load.in_flight) + " in flight",
                    against,
                    load.unit,
                    Measure::kRatio,
                    load.target};
  if (against == kPlain) question.target.reset();
  return question;
}

Contestant ContestantOf(const char* name, const Load& load, Connections& connections,
                        std::shared_ptr<const PreparedCall> call) {
  return {name, [&connections, call = std::move(call), in_flight = load.in_flight](double seconds) {
            return Drive(connections, {Script{call}}, in_flight, seconds);
          }};
}

Status Measured(Bench& bench, const Load& load, const Certificate& certificate) {
  const Result<std::unique_ptr<ServerProcess>> tls = bench.StartAttend(
      load.serves, {"--tls-cert", certificate.cert(), "--tls-key", certificate.key()});
  if (!tls.ok()) return tls.status();
  const Result<std::unique_ptr<ServerProcess>> plain = bench.StartAttend(load.serves);
  if (!plain.ok()) return plain.status();
  const int64_t answer_bytes = load.work->answer_bytes();
  const Result<std::unique_ptr<ServerProcess>> echo =
      ServerProcess::Start(ServeCommand("echo", {"127.0.0.1:0", std::to_string(answer_bytes),
                                                 certificate.cert(), certificate.key()}));
  if (!echo.ok()) return echo.status();
  Connections to_tls((*tls)->address(), load.connections, certificate.text());
  Connections to_plain((*plain)->address(), load.connections);
  Connections to_echo((*echo)->address(), load.connections, certificate.text());
  ATTEND_RETURN_IF_ERROR(AdmitAll(to_plain, {load.work}));
  ATTEND_RETURN_IF_ERROR(AdmitAll(to_tls, {load.work}));
  const std::vector<Contestant> contestants = {
      ContestantOf("attend over TLS", load, to_tls, CallOf(load.work)),
      ContestantOf("bare gRPC over TLS", load, to_echo, EchoCallOf(load.work, answer_bytes)),
      ContestantOf("attend", load, to_plain, CallOf(load.work))};
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return samples.status();
  bench.AddJudged(QuestionOf(load, kBare), (*samples)[0], (*samples)[1], load.rate);
  bench.AddJudged(QuestionOf(load, kPlain), (*samples)[0], (*samples)[2], load.rate);
  return Status();
}

}  // namespace

void RunTls(Bench& bench) {
  const auto calls = [](const Sample& sample) { return sample.calls_per_second(); };
  const auto gigabytes = [](const Sample& sample) { return sample.gigabytes_per_second(); };
  constexpr Target kSmall{Target::Sense::kAtLeast, 0.9};
  constexpr Target kLarge{Target::Sense::kAtLeast, 0.9};
  const int clients = bench.options().clients;
  const std::shared_ptr<Work> large = bench.TransferWork(
      "16 MiB in, 4 MiB out", test::MakeSpec(1, 8, 8, 2048, 3072, 128, 128, DType::kFloat16));
  const std::vector<Load> loads = {
      {bench.SmallWork(), Serves::kComputing, 1, 1, kSmall, "calls/s", calls},
      {bench.SmallWork(), Serves::kComputing, clients, clients, kSmall, "calls/s", calls},
      {large, Serves::kTransfers, 1, 2, kLarge, "GB/s", gigabytes},
      {large, Serves::kTransfers, 4, 8, kLarge, "GB/s", gigabytes}};
  for (const Load& load : loads) {
    const std::vector<Question> questions = {QuestionOf(load, kBare), QuestionOf(load, kPlain)};
    if (!bench.WantsAny(questions)) continue;
    Certificate certificate;
    Status status = certificate.Make();
    if (status.ok()) status = Measured(bench, load, certificate);
    if (!status.ok()) bench.AddWithout(questions, status);
  }
}

}  // namespace attend::bench
