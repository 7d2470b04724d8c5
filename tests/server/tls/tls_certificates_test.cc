// SPDX-License-Identifier: Apache-2.0
//
// Certificate files that change: a valid set is loaded as a whole, an invalid one changes nothing.

#include "server/tls/tls_certificates.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <spdlog/sinks/ostream_sink.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "kernels/util/clock.h"
#include "tests/server/support/self_signed.h"

namespace attend {
namespace {

namespace fs = std::filesystem;

class TlsCertificatesTest : public ::testing::Test {
 protected:
  TlsCertificatesTest() {
    fs::create_directories(folder_);
    Put("cert", first_.certificate);
    Put("key", first_.key);
  }
  ~TlsCertificatesTest() override { fs::remove_all(folder_); }

  // Under a new inode, so that a change within the resolution of file times is seen.
  void Put(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / "new") << text;
    fs::rename(folder_ / "new", folder_ / name);
  }
  TlsCertificates::Options Options() {
    TlsCertificates::Options options;
    options.cert = folder_ / "cert";
    options.key = folder_ / "key";
    options.now = [this] { return std::time(nullptr) + later_; };
    return options;
  }
  std::string LoadError() {
    const auto loaded = TlsCertificates::Load(Options(), metrics_, logger_);
    return loaded.ok() ? "" : loaded.status().message();
  }
  bool Logged(const std::string& text) { return log_.str().find(text) != std::string::npos; }
  double Metric(const std::string& name, const std::string& label) {
    for (const auto& family : registry_->Collect()) {
      for (const auto& metric : family.metric) {
        if (family.name != name || metric.label[0].value != label) continue;
        return metric.counter.value + metric.gauge.value;
      }
    }
    return -1;
  }

  const fs::path folder_ = ::testing::TempDir() + "attend_tls_" + std::to_string(getpid());
  const KeyAndCertificate first_ = *MakeSelfSigned("localhost");
  const KeyAndCertificate second_ = *MakeSelfSigned("localhost");
  std::time_t later_ = 0;
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  TlsMetrics metrics_{*registry_};
  const SteadyClock clock_;
  std::ostringstream log_;
  Logger logger_{{}, std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)};
};

TEST_F(TlsCertificatesTest, APairIsLoadedOnceItMatches) {
  const auto loaded = TlsCertificates::Load(Options(), metrics_, logger_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  TlsCertificates& certificates = **loaded;
  const auto before = certificates.current();
  EXPECT_NEAR(Metric("attend_tls_expiry_timestamp_seconds", "cert"), std::time(nullptr) + 86400,
              60);
  certificates.Look();
  EXPECT_EQ(certificates.current(), before);

  Put("cert", second_.certificate);
  certificates.Look();
  certificates.Look();  // which looks at nothing new
  EXPECT_EQ(certificates.current(), before);
  EXPECT_EQ(Metric("attend_tls_reloads_total", "failed"), 1);
  EXPECT_TRUE(Logged("is not the key of tls-cert")) << log_.str();

  Put("key", second_.key);
  certificates.Look();
  EXPECT_NE(certificates.current(), before);
  EXPECT_EQ(Metric("attend_tls_reloads_total", "ok"), 1);
  EXPECT_TRUE(Logged("certificates reloaded")) << log_.str();
}

// Too few descriptors may be temporary; the files are unchanged.
TEST_F(TlsCertificatesTest, FilesThatCouldNotBeReadAreRetried) {
  const auto loaded = TlsCertificates::Load(Options(), metrics_, logger_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const auto before = (*loaded)->current();
  const uint64_t generation = (*loaded)->generation();
  Put("cert", second_.certificate);
  Put("key", second_.key);
  rlimit some{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &some), 0);
  rlimit none = some;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  (*loaded)->Look();
  (*loaded)->Look();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &some), 0);
  EXPECT_TRUE(Logged("Too many open files")) << log_.str();
  EXPECT_EQ(Metric("attend_tls_reloads_total", "failed"), 1) << "it is told once";
  EXPECT_EQ((*loaded)->current(), before);
  EXPECT_EQ((*loaded)->generation(), generation);
  (*loaded)->Look();
  EXPECT_NE((*loaded)->current(), before);
  EXPECT_NE((*loaded)->generation(), generation);
  EXPECT_EQ(Metric("attend_tls_reloads_total", "ok"), 1);
}

TEST_F(TlsCertificatesTest, BrokenMissingOrExpiredFilesChangeNothing) {
  const auto loaded = TlsCertificates::Load(Options(), metrics_, logger_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const auto before = (*loaded)->current();
  const std::string whole = first_.certificate;
  int failed = 0;
  const auto expect_kept = [&](const std::string& why) {
    (*loaded)->Look();
    EXPECT_EQ((*loaded)->current(), before) << why;
    EXPECT_TRUE(Logged(why)) << why << ": " << log_.str();
    EXPECT_EQ(Metric("attend_tls_reloads_total", "failed"), ++failed);
  };
  Put("cert", whole + second_.certificate.substr(0, 200));
  expect_kept("has a broken certificate");
  Put("cert", "nothing\n");
  expect_kept("has no certificate in PEM");
  fs::remove(folder_ / "cert");
  expect_kept("No such file or directory");
  later_ = 2 * 86400;
  Put("cert", whole);
  expect_kept(" expired at ");
  later_ = -2 * 86400;
  Put("cert", whole + "\n");
  expect_kept(" is not valid before ");
  later_ = 0;
  Put("key", "no key\n");
  expect_kept("has no private key in PEM");
}

TEST_F(TlsCertificatesTest, StartErrorsNameTheSettingAndTheFile) {
  EXPECT_EQ(LoadError(), "");
  Put("key", second_.key);
  EXPECT_NE(LoadError().find("tls-key " + (folder_ / "key").string() +
                             " is not the key of tls-cert " + (folder_ / "cert").string()),
            std::string::npos)
      << LoadError();
  TlsCertificates::Options options = Options();
  options.cert = folder_ / "nowhere";
  const auto loaded = TlsCertificates::Load(options, metrics_, logger_);
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.status().message(),
            "tls-cert " + options.cert + " cannot be read: No such file or directory");
}

TEST_F(TlsCertificatesTest, TheThreadLoadsChanges) {
  const auto loaded = TlsCertificates::Load(Options(), metrics_, logger_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const auto before = (*loaded)->current();
  (*loaded)->Watch(clock_);
  Put("key", second_.key);
  Put("cert", second_.certificate);
  const TimePoint until = clock_.Now() + std::chrono::seconds(30);
  while ((*loaded)->current() == before && clock_.Now() < until) {
    clock_.SleepFor(std::chrono::milliseconds(10));
  }
  EXPECT_NE((*loaded)->current(), before);
}

}  // namespace
}  // namespace attend
