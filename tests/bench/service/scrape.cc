// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/scrape.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <sstream>
#include <utility>

namespace attend::bench {

std::string Scrape(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return "";
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  if (inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) return "";
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return "";
  std::string text;
  const std::string request = "GET /metrics HTTP/1.0\r\nHost: bench\r\n\r\n";
  if (connect(socket, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0 &&
      send(socket, request.data(), request.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(request.size())) {
    char part[16384];
    for (ssize_t got = 0; (got = recv(socket, part, sizeof(part), 0)) > 0;) {
      text.append(part, static_cast<size_t>(got));
    }
  }
  close(socket);
  const size_t body = text.find("\r\n\r\n");
  return body == std::string::npos ? "" : text.substr(body + 4);
}

std::optional<double> MetricSum(const std::string& exposition, const std::string& family,
                                const std::string& label) {
  std::optional<double> sum;
  std::istringstream lines(exposition);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(family)) continue;
    const char after = line.size() > family.size() ? line[family.size()] : '\0';
    const size_t space = line.rfind(' ');
    if ((after != '{' && after != ' ') || space == std::string::npos) continue;
    if (line.find(label) == std::string::npos) continue;
    sum = sum.value_or(0) + std::strtod(line.c_str() + space + 1, nullptr);
  }
  return sum;
}

Scraper::Scraper(std::string address) : address_(std::move(address)), thread_([this] { Run(); }) {}

Scraper::~Scraper() {
  stop_ = true;
  thread_.join();
}

void Scraper::Run() {
  while (!stop_) {
    if (!Scrape(address_).empty()) ++scrapes_;
    for (int i = 0; i < 20 && !stop_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace attend::bench
