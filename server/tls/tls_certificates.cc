// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_certificates.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

namespace attend {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kPeriod{1};
// Of one file; a revocation list of a large authority has some megabytes.
constexpr int64_t kFileBytesMax = int64_t{64} << 20;

// The files of a path: itself, or those of the folder.
std::vector<std::string> FilesOf(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> files;
  for (fs::directory_iterator each(path, error), end; !error && each != end;
       each.increment(error)) {
    if (each->is_regular_file(error)) files.push_back(each->path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

Status Append(const std::string& setting, const std::string& file, std::string* text) {
  std::error_code error;
  const auto bytes = fs::file_size(file, error);
  if (error) return InvalidArgument(setting + " " + file + ": " + error.message());
  if (bytes > static_cast<uintmax_t>(kFileBytesMax)) {
    return InvalidArgument(setting + " " + file + " has " + std::to_string(bytes) +
                           " bytes, may have " + std::to_string(kFileBytesMax));
  }
  std::ifstream in(file, std::ios::binary);
  if (!in) return InvalidArgument(setting + " " + file + ": " + std::strerror(errno));
  std::string bytes_read((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  *text += bytes_read + "\n";
  OPENSSL_cleanse(bytes_read.data(), bytes_read.size());
  return Status();
}

Status ReadText(const std::string& setting, const std::string& path, TlsText* text) {
  text->setting = setting;
  text->path = path;
  if (path.empty()) return Status();
  for (const std::string& file : FilesOf(path)) {
    ATTEND_RETURN_IF_ERROR(Append(setting, file, &text->pem));
  }
  return Status();
}

}  // namespace

Result<std::unique_ptr<TlsCertificates>> TlsCertificates::Load(Options options, TlsMetrics& metrics,
                                                               Logger& logger) {
  std::unique_ptr<TlsCertificates> made(new TlsCertificates(std::move(options), metrics, logger));
  made->stamps_ = made->Stamped();
  Result<std::shared_ptr<const TlsContext>> context = made->Read();
  if (!context.ok()) return context.status();
  made->Use(std::move(*context));
  return made;
}

void TlsCertificates::Watch(const Clock& clock) {
  watch_ = std::make_unique<PollThread>("attend-tls", kPeriod, clock, [this] { Look(); });
}

void TlsCertificates::Look() {
  Stamps stamps = Stamped();
  if (stamps == stamps_) return;
  // Taken before the files are read: what changes meanwhile is seen the next time.
  stamps_ = std::move(stamps);
  Result<std::shared_ptr<const TlsContext>> context = Read();
  metrics_.RecordReload(context.ok());
  if (!context.ok()) {
    logger_.Log(LogLevel::err, "certificates are not taken, those before stay",
                {{"error", context.status().message()}});
    return;
  }
  Use(std::move(*context));
  logger_.Log(LogLevel::info, "certificates are taken",
              {{"cert", options_.cert}, {"expires", current()->expiries().cert}});
}

std::shared_ptr<const TlsContext> TlsCertificates::current() const {
  const MutexLock lock(mutex_);
  return context_;
}

TlsCertificates::Stamps TlsCertificates::Stamped() const {
  Stamps stamps;
  for (const std::string* const path :
       {&options_.cert, &options_.key, &options_.client_ca, &options_.crl}) {
    if (path->empty()) continue;
    for (const std::string& file : FilesOf(*path)) stamps.emplace_back(file, StampOf(file));
  }
  return stamps;
}

Result<std::shared_ptr<const TlsContext>> TlsCertificates::Read() const {
  TlsTexts texts;
  ATTEND_RETURN_IF_ERROR(ReadText(options_.settings + "-cert", options_.cert, &texts.cert));
  ATTEND_RETURN_IF_ERROR(ReadText(options_.settings + "-key", options_.key, &texts.key));
  ATTEND_RETURN_IF_ERROR(
      ReadText(options_.settings + "-client-ca", options_.client_ca, &texts.client_ca));
  ATTEND_RETURN_IF_ERROR(ReadText(options_.settings + "-crl", options_.crl, &texts.crl));
  Result<std::shared_ptr<const TlsContext>> context =
      TlsContext::Make(texts, options_.context, options_.now());
  OPENSSL_cleanse(texts.key.pem.data(), texts.key.pem.size());
  return context;
}

void TlsCertificates::Use(std::shared_ptr<const TlsContext> context) {
  const TlsContext::Expiries& expiries = context->expiries();
  metrics_.SetExpiry(options_.of, expiries.cert);
  if (!options_.client_ca.empty()) metrics_.SetExpiry(TlsFile::kClientCa, expiries.client_ca);
  if (!options_.crl.empty()) metrics_.SetExpiry(TlsFile::kCrl, expiries.crl);
  const MutexLock lock(mutex_);
  context_ = std::move(context);
}

}  // namespace attend
