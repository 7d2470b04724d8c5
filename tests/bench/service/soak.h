// SPDX-License-Identifier: Apache-2.0
//
// A load that uses every way into and out of a server, the rude ones too: answered calls of many
// sizes, calls cancelled at any moment, deadlines too short, streams closed early, chunked uploads,
// regions of shared memory that come and go, also while calls use them, sessions that are appended
// to, read, forked and left to their leases, processes that are killed with calls under way and a
// region of their own.

#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

// Runs from its start until Stop() or its end, on threads of its own.
class SoakLoad {
 public:
  // `socket` is the server's for shared memory. `works` are right inputs for the server; their
  // answers are judged now and then, those in shared memory all.
  SoakLoad(const std::string& address, const std::string& socket,
           std::vector<std::shared_ptr<Work>> works, uint64_t seed);
  ~SoakLoad();

  // Waits for its threads, and for every call to have ended.
  void Stop();

  struct Counts {
    int64_t answered = 0;
    int64_t ended_otherwise = 0;   // cancelled, or late
    int64_t regions = 0;           // of shared memory, made by clients that live
    int64_t region_answers = 0;    // right ones in them, also among `answered`
    int64_t killed_clients = 0;    // each with a region
    int64_t sessions = 0;          // forks too
    int64_t session_answers = 0;   // also among `answered`
    int64_t dropped_sessions = 0;  // without being freed
  };
  Counts counts() const {
    return {answered_,       ended_otherwise_, regions_,         region_answers_,
            killed_clients_, sessions_,        session_answers_, dropped_sessions_};
  }
  // What should not have happened: a wrong answer, or a status that nobody asked for. Empty: none.
  std::string fault() const;

 private:
  using Client = client::Client;
  class Sharer;   // one thread's use of shared memory
  class Decoder;  // one thread's sessions

  void Calls(uint64_t seed);
  void Cancels(uint64_t seed);
  void Streams(uint64_t seed);
  void Regions(uint64_t seed);
  void Sessions(uint64_t seed);
  void KilledClients(uint64_t seed);
  void Fault(const std::string& text);
  // `also`: what may end this call besides.
  void Count(const Status& status, std::initializer_list<Code> also = {});
  const Work& Pick(uint64_t random) const { return *works_[random % works_.size()]; }

  const std::string address_;
  const std::string socket_;
  const std::vector<std::shared_ptr<Work>> works_;
  std::unique_ptr<Client> client_;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> answered_ = 0;
  std::atomic<int64_t> ended_otherwise_ = 0;
  std::atomic<int64_t> regions_ = 0;
  std::atomic<int64_t> region_answers_ = 0;
  std::atomic<int64_t> killed_clients_ = 0;
  std::atomic<int64_t> sessions_ = 0;
  std::atomic<int64_t> session_answers_ = 0;
  std::atomic<int64_t> dropped_sessions_ = 0;
  mutable std::mutex mutex_;
  std::string fault_;
  std::vector<std::thread> threads_;
};

}  // namespace attend::bench
