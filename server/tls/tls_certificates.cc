// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_certificates.h"

#include <openssl/crypto.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"

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

// What tells a file from the one that was there before: not its name alone, as with Kubernetes'
// links to folders.
std::string MarkOf(const std::string& file) {
  struct stat about {};
  if (stat(file.c_str(), &about) != 0) return file + " is missing\n";
  return file + " " + std::to_string(about.st_dev) + " " + std::to_string(about.st_ino) + " " +
         std::to_string(about.st_size) + " " + std::to_string(about.st_mtim.tv_sec) + "." +
         std::to_string(about.st_mtim.tv_nsec) + "\n";
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
  made->marks_ = made->Marks();
  Result<std::shared_ptr<const TlsContext>> context = made->Read();
  if (!context.ok()) return context.status();
  made->Use(std::move(*context));
  return made;
}

TlsCertificates::~TlsCertificates() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    ends_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void TlsCertificates::Watch() {
  thread_ = std::thread([this] { Run(); });
}

void TlsCertificates::Run() {
  NameThread("attend-tls");
  for (;;) {
    {
      const MutexLock lock(mutex_);
      const auto until = std::chrono::steady_clock::now() + kPeriod;
      while (!ends_ && changed_.WaitUntil(mutex_, until)) {
      }
      if (ends_) return;
    }
    Look();
  }
}

void TlsCertificates::Look() {
  std::string marks = Marks();
  if (marks == marks_) return;
  // Taken before the files are read: what changes meanwhile is seen the next time.
  marks_ = std::move(marks);
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

std::string TlsCertificates::Marks() const {
  std::string marks;
  for (const std::string* const path :
       {&options_.cert, &options_.key, &options_.client_ca, &options_.crl}) {
    if (path->empty()) continue;
    for (const std::string& file : FilesOf(*path)) marks += MarkOf(file);
  }
  return marks;
}

Result<std::shared_ptr<const TlsContext>> TlsCertificates::Read() const {
  TlsTexts texts;
  ATTEND_RETURN_IF_ERROR(ReadText("tls-cert", options_.cert, &texts.cert));
  ATTEND_RETURN_IF_ERROR(ReadText("tls-key", options_.key, &texts.key));
  ATTEND_RETURN_IF_ERROR(ReadText("tls-client-ca", options_.client_ca, &texts.client_ca));
  ATTEND_RETURN_IF_ERROR(ReadText("tls-crl", options_.crl, &texts.crl));
  Result<std::shared_ptr<const TlsContext>> context =
      TlsContext::Make(texts, options_.require_client, options_.now());
  OPENSSL_cleanse(texts.key.pem.data(), texts.key.pem.size());
  return context;
}

void TlsCertificates::Use(std::shared_ptr<const TlsContext> context) {
  metrics_.SetExpiry(TlsFile::kCert, context->expiries().cert);
  metrics_.SetExpiry(TlsFile::kClientCa, context->expiries().client_ca);
  metrics_.SetExpiry(TlsFile::kCrl, context->expiries().crl);
  const MutexLock lock(mutex_);
  context_ = std::move(context);
}

}  // namespace attend
