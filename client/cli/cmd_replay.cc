// SPDX-License-Identifier: Apache-2.0
//
// attend-client replay: resends a request that the server dumped after a failed reference check.
// The directory contains request.binpb (an AttendRequest), response.binpb (the AttendResponse that
// failed) and report.json.

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "client/cli/commands.h"
#include "client/tool/file_io.h"
#include "client/tool/verify.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

struct ReplayOptions {
  std::string dir;
  std::string kernel;
  double deadline_s = 300;
  std::string tenant;
  uint64_t seed = 1;
};

template <class Message>
Status ReadMessage(const std::string& path, Message* message) {
  const Result<std::string> bytes = ReadWholeFile(path);
  if (!bytes.ok()) return bytes.status();
  if (bytes->size() > INT32_MAX || !message->ParseFromString(*bytes)) {
    return InvalidArgument(path + ": not a valid " + message->GetTypeName());
  }
  return Status();
}

// Prints the server's report. It is informative only, so a missing or malformed file is reported,
// but not an error.
void PrintReport(const std::string& path) {
  const Result<std::string> text = ReadWholeFile(path);
  if (!text.ok()) {
    std::printf("dumped   no report: %s\n", Printable(text.status().message()).c_str());
    return;
  }
  const auto report = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object()) {
    std::printf("dumped   %s is not a JSON object\n", path.c_str());
    return;
  }
  std::printf("dumped  ");
  for (const auto& [key, value] : report.items()) {
    const std::string words = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    std::printf(" %s %s", Printable(key).c_str(), Printable(words).c_str());
  }
  std::printf("\n");
}

constexpr char kEqual[] = "bitwise equal";

// Returns kEqual or the number of different elements.
std::string Compare(const HostTensor& now, const std::string& then) {
  if (now.bytes != static_cast<int64_t>(then.size())) {
    return "sizes differ: " + std::to_string(now.bytes) + " bytes now, " +
           std::to_string(then.size()) + " then";
  }
  int64_t different = 0;
  const int64_t width = DTypeBytes(now.dtype);
  for (int64_t at = 0; at < now.bytes; at += width) {
    different +=
        std::memcmp(now.data.get() + at, then.data() + at, static_cast<size_t>(width)) != 0;
  }
  if (different == 0) return kEqual;
  return std::to_string(different) + " of " + std::to_string(now.bytes / width) +
         " elements differ";
}

// Prints how each tensor of the answer compares with the dumped one; returns whether all are equal.
bool PrintDifferences(const AttentionCall& call, const AttentionResult& result,
                      const v1::AttendResponse& failed) {
  bool same = true;
  int raw = 0;
  for (const AnswerTensor& each : AnswerTensors(call)) {
    const HostTensor* const now = TensorOf(result, each.name);
    const std::string words = now == nullptr || raw >= failed.raw_size()
                                  ? "nothing to compare with in response.binpb"
                                  : Compare(*now, failed.raw(raw));
    ++raw;
    same = same && words == kEqual;
    std::printf("%-8s %s\n", NameOf(each.name), words.c_str());
  }
  return same;
}

int Run(const ReplayOptions& options, const CommonOptions& common) {
  auto request = std::make_shared<v1::AttendRequest>();
  v1::AttendResponse failed;
  Status read = ReadMessage(options.dir + "/request.binpb", request.get());
  if (read.ok()) read = ReadMessage(options.dir + "/response.binpb", &failed);
  if (!read.ok()) return Fail(read, kExitUsage);
  Result<AttentionCall> call = CallFromRequest(request);
  if (!call.ok()) return Fail(call.status(), kExitUsage);
  call->check = true;
  if (!options.kernel.empty()) call->kernel = options.kernel;
  PrintReport(options.dir + "/report.json");

  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  WarnOfTenant(options.tenant, **client);
  CallOptions call_options;
  call_options.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.deadline_s * 1e9));
  call_options.tenant = options.tenant;
  const Result<AttentionResult> result = (*client)->Call(*call, call_options);
  if (!result.ok()) return Fail(result.status(), kExitFailed);
  std::printf("answer   request %s, %s\n", Printable(result->request_id).c_str(),
              DescribeAnswer(*result).c_str());
  const bool same = PrintDifferences(*call, *result, failed);
  bool ok = result->check && !result->check->failed();
  bool judged = result->check && result->check->ok;
  std::printf("server   %s\n",
              result->check ? DescribeCheck(*result->check).c_str() : "sent no check report");
  const Result<RowsReport> report = VerifyAnswer(*call, *result, options.seed);
  if (!report.ok()) return Fail(report.status(), kExitFailed);
  ok = ok && !report->failed();
  judged = judged && report->ok;
  std::printf("client   %s\n", DescribeCheck(*report).c_str());
  std::printf("verdict  %s\n",
              !ok ? "reproduced: the new answer fails as well"
              : !judged
                  ? "not reproduced: of the new answer not all can be judged, and nothing fails"
              : same ? "not reproduced: this is the dumped answer, and it passes"
                     : "not reproduced: the new answer passes");
  return ok ? kExitOk : kExitFailed;
}

}  // namespace

Command AddReplay(CLI::App& app, const CommonOptions& common) {
  const auto options = std::make_shared<ReplayOptions>();
  CLI::App* command =
      app.add_subcommand("replay", "Resend a request that the server dumped, with checks");
  command->add_option("dir", options->dir, "Directory with request.binpb and response.binpb")
      ->required();
  command->add_option("--kernel", options->kernel,
                      "Kernel to use instead of the one that the request named");
  command->add_option("--seed", options->seed, "Seed that selects the rows verified here")
      ->capture_default_str();
  command->add_option("--deadline-s", options->deadline_s, "Deadline of the call, in seconds")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  AddTenant(command, &options->tenant);
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
