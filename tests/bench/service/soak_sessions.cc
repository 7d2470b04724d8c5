// SPDX-License-Identifier: Apache-2.0
//
// The soak's use of sessions.

#include <chrono>
#include <string>

#include "client/session.h"
#include "tests/bench/service/soak.h"

namespace attend::bench {
namespace {

using client::AttentionCall;
using client::Session;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kLease{4};
constexpr uint64_t kRoundsMost = 8;
constexpr uint64_t kJudgedEvery = 16;

// What may befall a session besides what befalls any call: it was evicted, or an append was made
// whose answer was given up.
constexpr std::initializer_list<Code> kChanged = {Code::kOutOfRange, Code::kFailedPrecondition};
constexpr std::initializer_list<Code> kChangedOrOver = {Code::kOutOfRange,
                                                        Code::kFailedPrecondition, Code::kNotFound};

}  // namespace

// One thread's: sessions that are appended to, read, forked and cut. Most are left to their leases.
class SoakLoad::Decoder {
 public:
  Decoder(SoakLoad& load, uint64_t seed) : load_(load), random_(seed) {}

  void UseSession();

 private:
  void Count(const Status& status) {
    // Only then may the lease be over.
    const bool late = steady_clock::now() - used_ >= kLease;
    load_.Count(status, late ? kChangedOrOver : kChanged);
    if (status.ok()) used_ = called_;
  }
  void Round(const Work& work, Session& session);
  void Attend(const Work& work, Session& session);
  void Fork(const Work& work, const Session& session);
  // An append of the work's tokens that may be under way when the session is dropped.
  void CancelAppend(const Work& work, Session& session);

  SoakLoad& load_;
  std::mt19937_64 random_;
  steady_clock::time_point used_, called_;  // begins of the last call that succeeded, and of any
};

void SoakLoad::Decoder::UseSession() {
  const Work& work = load_.Pick(random_());
  const AttentionCall& call = work.call();
  client::SessionOptions options;
  options.shapes = {{call.k.dtype, call.k.shape[1], call.k.shape[3], call.v.shape[3]}};
  options.lease = kLease;
  used_ = called_ = steady_clock::now();
  Result<Session> session = Session::Create(*load_.client_, options);
  Count(session.status());
  if (!session.ok()) return;
  ++load_.sessions_;
  for (uint64_t rounds = 1 + random_() % kRoundsMost; rounds > 0 && !load_.stop_; --rounds) {
    called_ = steady_clock::now();
    Round(work, *session);
  }
  const uint64_t end = random_() % 4;
  if (end == 0) return;  // which frees it
  if (end == 1) CancelAppend(work, *session);
  session->Release();
  ++load_.dropped_sessions_;
}

void SoakLoad::Decoder::Round(const Work& work, Session& session) {
  const int64_t tokens = work.call().k.shape[2];
  const bool partial = session.length() != 0 && session.length() != tokens;
  const uint64_t what = random_() % 4;
  if (partial || what == 0) return Count(session.Truncate(0));
  if (what == 1) return Fork(work, session);
  Attend(work, session);
}

// The work's K and V at once, or its Q alone if they are there: the same answer.
void SoakLoad::Decoder::Attend(const Work& work, Session& session) {
  AttentionCall call = work.call();
  if (session.length() != 0) call.k = call.v = {};
  client::CallOptions options;
  options.transport =
      random_() % 4 == 0 ? client::CallTransport::kChunked : client::CallTransport::kInline;
  const Result<client::AttentionResult> answer = session.Attend(0, call, options);
  Count(answer.status());
  if (!answer.ok()) return;
  ++load_.session_answers_;
  std::string wrong = answer->o.bytes == work.output_bytes() ? "" : "O has a wrong size";
  if (wrong.empty() && random_() % kJudgedEvery == 0) {
    wrong = work.CheckOutput(answer->o.data.get());
  }
  if (!wrong.empty()) load_.Fault("over a session: " + wrong);
}

void SoakLoad::Decoder::Fork(const Work& work, const Session& session) {
  Result<Session> fork = session.Fork();
  Count(fork.status());
  if (!fork.ok()) return;
  ++load_.sessions_;
  if (fork->length() == 0 || fork->length() == work.call().k.shape[2]) Attend(work, *fork);
  if (random_() % 2 == 0) return;
  fork->Release();
  ++load_.dropped_sessions_;
}

void SoakLoad::Decoder::CancelAppend(const Work& work, Session& session) {
  called_ = steady_clock::now();
  Count(session.Truncate(0));
  client::CallHandle handle = Session::AttendAsync(
      {&session}, 0, work.call(), {}, [load = &load_](const client::CallOutcome& outcome) {
        load->Count(outcome.status, kChangedOrOver);
      });
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
  handle.Cancel();
}

void SoakLoad::Sessions(uint64_t seed) {
  Decoder decoder(*this, seed);
  while (!stop_) decoder.UseSession();
}

}  // namespace attend::bench
