// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/wire_call.h"

#include "server/wire/status_text.h"

namespace attend {
namespace {

class RefusedHandler final : public CallHandler {
 public:
  void OnMessage(InMessage) override {}
  void OnHalfClose() override {}
  void OnWritten(bool) override {}
  void OnCancel() override {}
  void OnDone() override {}
};

}  // namespace

std::vector<Credentials::Name> WireCall::CertificateNames() const {
  std::vector<Credentials::Name> names;
  const auto add = [&](const std::vector<std::string>& texts, CertificateName kind) {
    for (const std::string& text : texts) names.push_back({kind, text});
  };
  add(call_.peer().uris, CertificateName::kUri);
  add(call_.peer().dns_names, CertificateName::kDns);
  add(call_.peer().common_names, CertificateName::kCommon);
  return names;
}

int WireCall::Find(std::string_view key, std::string_view& first) const {
  int count = 0;
  for (const auto& [name, value] : call_.metadata()) {
    if (name == key && count++ == 0) first = value;
  }
  return count;
}

void WireCall::End(const Status& status) const {
  Status told = status.ok() ? status : Status(status.code(), CutMessage(status.message()));
  call_.Finish({std::move(told), std::move(trailers_)});
}

CallHandler* RefuseCall(const WireCall& wire, const Status& status) {
  static RefusedHandler refused;
  wire.End(status);
  return &refused;
}

}  // namespace attend
