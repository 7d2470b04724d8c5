// SPDX-License-Identifier: Apache-2.0
//
// Changes are detected by the stamps of all files, including those in a folder of revocation lists.
// Stamps are taken before the files are read, so a change during a read is seen at the next check.
// A set of files is used as a whole or not at all.

#include "server/tls/tls_certificates.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "server/util/whole_file.h"
#include "server/util/wipe.h"

namespace attend {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kPeriod{1};
// Per file; revocation lists of large authorities have several MB.
constexpr int64_t kFileBytesMax = int64_t{64} << 20;

// The files at a path: the file itself, or those of the folder. On error there may be more.
std::vector<std::string> FilesOf(const std::string& path, std::error_code& error) {
  if (!fs::is_directory(path, error)) {
    error.clear();
    return {path};
  }
  std::vector<std::string> files;
  for (fs::directory_iterator each(path, error), end; !error && each != end;
       each.increment(error)) {
    if (each->is_regular_file(error)) files.push_back(each->path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// UNAVAILABLE: a read error, to be retried.
Status ReadText(const std::string& setting, const std::string& path, TlsText* text) {
  text->setting = setting;
  text->path = path;
  if (path.empty()) return Status();
  std::error_code error;
  for (const std::string& file : FilesOf(path, error)) {
    Result<std::string> bytes = ReadWholeFile(file, kFileBytesMax);
    if (!bytes.ok()) return Status(bytes.status().code(), setting + " " + bytes.status().message());
    text->pem.append(*bytes) += "\n";
    Wipe(*bytes);
  }
  return error ? Unavailable(setting + " " + path + ": " + error.message()) : Status();
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

void TlsCertificates::Watch(const Clock& clock, std::function<void()> changed) {
  watch_ = std::make_unique<PollThread>("attend-tls", kPeriod, clock,
                                        [this, changed = std::move(changed)] {
                                          const uint64_t before = generation();
                                          Look();
                                          if (changed && generation() != before) changed();
                                        });
}

void TlsCertificates::Look() {
  Stamps stamps = Stamped();
  if (stamps == stamps_) return;
  // Taken before reading: later changes are seen at the next check.
  stamps_ = std::move(stamps);
  Result<std::shared_ptr<const TlsContext>> context = Read();
  const bool unread = context.status().code() == Code::kUnavailable;
  if (unread) stamps_.clear();  // forces a retry
  const std::string before = std::exchange(unread_, unread ? context.status().message() : "");
  if (unread && unread_ == before) return;  // already reported
  metrics_.RecordReload(options_.of, context.ok());
  if (!context.ok()) {
    logger_.Log(LogLevel::err, "certificates not reloaded; the previous ones stay in use",
                {{"error", context.status().message()}});
    return;
  }
  Use(std::move(*context));
  logger_.Log(LogLevel::info, "certificates reloaded",
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
    std::error_code error;
    for (const std::string& file : FilesOf(*path, error)) stamps.emplace_back(file, StampOf(file));
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
  Wipe(texts.key.pem);
  return context;
}

void TlsCertificates::Use(std::shared_ptr<const TlsContext> context) {
  const TlsContext::Expiries& expiries = context->expiries();
  metrics_.SetExpiry(options_.of, expiries.cert);
  if (!options_.client_ca.empty()) metrics_.SetExpiry(TlsFile::kClientCa, expiries.client_ca);
  if (!options_.crl.empty()) metrics_.SetExpiry(TlsFile::kCrl, expiries.crl);
  {
    const MutexLock lock(mutex_);
    context_ = std::move(context);
  }
  generation_.fetch_add(1, std::memory_order_release);
}

}  // namespace attend
