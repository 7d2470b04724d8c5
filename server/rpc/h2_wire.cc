// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/h2_wire.h"

#include "server/wire/status_text.h"

namespace attend {
namespace {

class RefusedHandler final : public CallHandler {
 public:
  void OnMessage(InMessage) override {}
  void OnHalfClose() override {}
  void OnWritten(bool) override {}
  void OnCancel() override {}
  void OnDone() override { delete this; }
};

}  // namespace

std::vector<Credentials::Name> H2Wire::CertificateNames() const {
  std::vector<Credentials::Name> names;
  const auto add = [&](const std::vector<std::string>& texts, CertificateName kind) {
    for (const std::string& text : texts) names.push_back({kind, text});
  };
  add(call_.peer().uris, CertificateName::kUri);
  add(call_.peer().dns_names, CertificateName::kDns);
  add(call_.peer().common_names, CertificateName::kCommon);
  return names;
}

int H2Wire::Find(std::string_view key, std::string_view& first) const {
  int count = 0;
  for (const auto& [name, value] : call_.metadata()) {
    if (name == key && count++ == 0) first = value;
  }
  return count;
}

void H2Wire::End(const Status& status) const {
  Status told = status.ok() ? status : Status(status.code(), CutMessage(status.message()));
  call_.Finish({std::move(told), std::move(trailers_)});
}

CallHandler* RefuseCall(const H2Wire& wire, const Status& status) {
  auto* const refused = new RefusedHandler();
  wire.End(status);
  return refused;
}

}  // namespace attend
