// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/bench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

namespace attend::bench {

bool Bench::Wants(const Question& question) const {
  return (question.work + ", " + question.against).find(options_.cells) != std::string::npos;
}

bool Bench::WantsAny(const std::vector<Question>& questions) const {
  return std::any_of(questions.begin(), questions.end(),
                     [this](const Question& question) { return Wants(question); });
}

void Bench::Add(Figure figure) {
  const Figure& added = figures_.emplace_back(std::move(figure));
  const Question& q = added.question;
  std::fprintf(stderr, "%s | %s | %s: ", q.row.c_str(), q.work.c_str(), q.against.c_str());
  if (added.measured()) {
    std::fprintf(stderr, "%.3f %s\n", added.result, VerdictName(added.verdict));
  } else {
    std::fprintf(stderr, "%s, %s\n", VerdictName(added.verdict), added.reason.c_str());
  }
}

void Bench::AddWithout(const std::vector<Question>& questions, const Status& reason) {
  for (const Question& question : questions) {
    if (Wants(question)) Add(Failed(question, reason.ToString()));
  }
}

void Bench::AddJudged(Question question, const Samples& attend, const Samples& rival,
                      const std::function<double(const Sample&)>& of) {
  if (Wants(question)) Add(Judge(std::move(question), Values(attend, of), Values(rival, of)));
}

std::shared_ptr<Work> Bench::SmallWork() const {
  if (gpu()) {
    return std::make_shared<Work>("B1 H8 L128 D64 fp16",
                                  test::MakeSpec(1, 8, 8, 128, 128, 64, 64, DType::kFloat16),
                                  Truth::kAttention, options_.seed);
  }
  return std::make_shared<Work>("B1 H1 L16 D64 fp32", test::MakeSpec(1, 1, 1, 16, 16, 64, 64),
                                Truth::kAttention, options_.seed);
}

std::shared_ptr<Work> Bench::TransferWork(std::string name, const test::ProblemSpec& spec) const {
  return std::make_shared<Work>(
      std::move(name), spec, passes_through() ? Truth::kMarks : Truth::kAttention, options_.seed);
}

Result<std::unique_ptr<ServerProcess>> Bench::StartAttend(Serves serves,
                                                          std::vector<std::string> flags) const {
  std::vector<std::string> arguments;
  const bool pass_through = serves == Serves::kTransfers && passes_through();
  for (const auto& [flag, value] : {std::pair<const char*, std::string>{"--listen", "127.0.0.1:0"},
                                    {"--metrics-listen", "off"},
                                    {"--log-level", "warn"},
                                    {"--device", pass_through ? "cpu" : options_.device}}) {
    if (std::find(flags.begin(), flags.end(), flag) == flags.end()) {
      arguments.insert(arguments.end(), {flag, value});
    }
  }
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  arguments.insert(arguments.end(), options_.server_flags.begin(), options_.server_flags.end());
  return ServerProcess::Start(
      ServeCommand(pass_through ? "attend-pass-through" : "attend", arguments));
}

Result<std::unique_ptr<ServerProcess>> StartEcho(int64_t answer_bytes, const std::string& listen,
                                                 EchoKind kind) {
  return ServerProcess::Start(ServeCommand(kind == EchoKind::kPlain ? "echo" : "inline-echo",
                                           {listen, std::to_string(answer_bytes)}));
}

Status AdmitAll(Connections& connections, const std::vector<std::shared_ptr<Work>>& works) {
  BlockingCaller caller(connections);
  for (const std::shared_ptr<Work>& work : works) {
    Result<grpc::ByteBuffer> answer = caller.Call(work->Message());
    if (!answer.ok()) return answer.status();
    ATTEND_RETURN_IF_ERROR(work->Admit(*answer));
  }
  return Status();
}

TempFolder::TempFolder() {
  std::error_code error;
  path_ = (std::filesystem::temp_directory_path(error) / "attend-bench-XXXXXX").string();
  if (error || mkdtemp(path_.data()) == nullptr) path_.clear();
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace attend::bench
