// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/test_server.h"

#include <arpa/inet.h>
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spdlog/sinks/base_sink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "server/engine/engine.h"
#include "tests/server/support/await.h"

namespace attend::test {

struct TestServer::Log {
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::string text() {
      const std::lock_guard lock(mutex_);
      return text_;
    }

   protected:
    void sink_it_(const spdlog::details::log_msg& message) override {
      text_.append(message.payload.data(), message.payload.size());
    }
    void flush_() override {}

   private:
    std::string text_;
  };
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();
};

TestServer::TestServer(const std::function<void(Config&)>& change, int devices, Devices kind,
                       std::shared_ptr<const Clock> clock)
    : log_(std::make_unique<Log>()) {
  google::protobuf::SetLogHandler(nullptr);  // bad messages are intended here
  Config config;
  config.listen = {"127.0.0.1:0"};
  config.metrics_listen = "off";  // stopping its server takes seconds
  config.log_level = "debug";
  if (change) change(config);
  std::vector<std::unique_ptr<Backend>> backends;
  for (int i = 0; i < devices; ++i) {
    auto backend = std::make_unique<test::FakeBackend>(i == 0 ? "cpu" : "cpu" + std::to_string(i));
    if (config.cuda_ipc) backend->SetUuid(DeviceUuid(i));
    if (kind == Devices::kStaging) backend->AddStaging();
    if (kind == Devices::kGathering) backend->GatherSpans();
    if (kind == Devices::kFarSessions) backend->MakeArenasFar();
    backends_.push_back(backend.get());
    backends.push_back(std::move(backend));
  }
  auto logger = std::make_shared<Logger>(Logger::Options(), log_->sink);
  logger->set_level(spdlog::level::from_str(config.log_level));
  Result<std::unique_ptr<Server>> server =
      Server::Start(config, std::move(backends), logger, std::move(clock));
  if (!server.ok()) throw std::runtime_error(server.status().ToString());
  server_ = std::move(*server);
}

std::string TestServer::DeviceUuid(int i) {
  return std::string(15, 'u') + static_cast<char>('0' + i);
}

TestServer::~TestServer() {
  for (test::FakeBackend* backend : backends_) {
    backend->Release();
    if (backend->CanStage()) backend->staging().Release();
  }
}

std::string TestServer::log() const { return log_->sink->text(); }

std::string TestServer::Metrics() const { return HttpGet(server_->metrics_address(), "/metrics"); }

double TestServer::Metric(const std::string& sample) const {
  std::istringstream lines(Metrics());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(sample + " ")) return std::atof(line.c_str() + sample.size());
  }
  return -1;
}

void TestServer::WaitForQueued(int64_t requests) const {
  int64_t queued = 0;
  const bool are = Await("the devices' queues have as many requests", [&] {
    queued = 0;
    for (const Engine::DeviceState& device : server_->engine().Devices()) queued += device.queued;
    return queued == requests;
  });
  if (!are) ADD_FAILURE() << queued << " requests are queued, not " << requests;
}

// gRPC 1.51 reads the errno of connect() only after it has allocated, which may have changed it: a
// connection that is under way is then given up. Calls wait for the next one.
std::shared_ptr<grpc::Channel> TestServer::Connect() const {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(R"({"methodConfig": [{"name": [{}], "waitForReady": true}]})");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

std::unique_ptr<v1::AttentionService::Stub> TestServer::Stub() const {
  return v1::AttentionService::NewStub(Connect());
}

grpc::Status SendBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& bytes,
                       v1::AttendResponse* response) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer answer;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/attend.v1.AttentionService/Attend", grpc::StubOptions(), &request,
                 &answer, [&done](grpc::Status status) { done.set_value(std::move(status)); });
  grpc::Status status = done.get_future().get();
  if (!status.ok()) return status;
  return grpc::SerializationTraits<v1::AttendResponse>::Deserialize(&answer, response);
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  std::string answer;
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  if (connect(socket, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0 &&
      write(socket, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t got; (got = read(socket, buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, static_cast<size_t>(got));
    }
  }
  close(socket);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

}  // namespace attend::test
