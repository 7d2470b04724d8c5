// SPDX-License-Identifier: Apache-2.0

#include "client/load/session_load.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "client/load/true_time.h"
#include "client/session.h"
#include "kernels/util/thread_name.h"

namespace attend::client {
namespace {

// Expected number of verified steps of a verified sequence, besides its prompt and last step.
constexpr double kStepsVerified = 8;

// K and V sent for one layer of a sequence, token by token (BLHD), so that the layer's contents at
// any time are a prefix.
struct History {
  TensorRef k, v;  // tokens so far; the memory has room for all

  static Result<History> Make(const CallSpec& spec, int64_t capacity) {
    History history;
    for (const auto& [name, dim, to] :
         {std::tuple{"k", spec.dim, &history.k}, std::tuple{"v", spec.dim_v, &history.v}}) {
      const auto made = HostTensor::Make(name, spec.dtype, {1, capacity, spec.heads_kv, dim});
      if (!made.ok()) return made.status();
      *to = *made;
      to->shape[1] = to->bytes = 0;
    }
    return history;
  }
  void Append(const AttentionCall& call) {
    for (const auto& [rows, to] : {std::pair{&call.k, &k}, std::pair{&call.v, &v}}) {
      if (rows->bytes > 0) {
        auto* const memory = static_cast<std::byte*>(const_cast<void*>(to->data));
        std::memcpy(memory + to->bytes, rows->data, static_cast<size_t>(rows->bytes));
      }
      to->bytes += rows->bytes;
      to->shape[1] += rows->shape[1];
    }
  }
};

// One sequence and its fork, on a thread of its own.
class Sequence {
 public:
  // Steps go over `stream` if it is not null.
  Sequence(const LoadOptions& options, Client& client, Stream* stream,
           const std::atomic<bool>& interrupted, uint64_t seed, bool verified)
      : options_(options),
        load_(options.session),
        client_(client),
        stream_(stream),
        interrupted_(interrupted),
        verified_(verified),
        random_(seed) {
    layer_verified_ = static_cast<int32_t>(random_.Below(load_.layers));
    forks_ = random_.Uniform() < load_.fork_share;
  }

  void Run() {
    const Status status = RunAll();
    if (status.ok() || interrupted_) return;
    ++stats_.failures[status.code()];
    stats_.first_message[status.code()] = status.message();
    stats_.unexpected += !options_.allowed.contains(status.code());
  }
  const SessionLoadStats& stats() const { return stats_; }
  void Verify(VerifyQueue* queue) {
    for (Kept& kept : kept_) queue->Add(kept.call, std::move(kept.result), random_.Bits());
  }

 private:
  // An answer to verify, and the equivalent call with all of K and V.
  struct Kept {
    AttentionCall call;
    AttentionResult result;
  };

  Status RunAll();
  Status Decode(Session& session, Stream* stream, History& history);
  // A prompt or a step, on all layers: makes fresh data, then calls. `keep`: keep the answer for
  // verification.
  struct Cost {
    int64_t begin = 0;    // first call's send
    int64_t ns = 0;       // of the calls only
    double bytes_in = 0;  // of tensors, to the server
    double bytes_out = 0;
  };
  Result<Cost> Append(Session& session, int64_t tokens, bool keep, Stream* stream,
                      History& history);
  void Think();

  const LoadOptions& options_;
  const SessionLoad& load_;
  Client& client_;
  Stream* const stream_;
  const std::atomic<bool>& interrupted_;
  const bool verified_;
  bool forks_ = false;
  int32_t layer_verified_ = 0;
  Random random_;
  SessionLoadStats stats_;
  std::deque<Kept> kept_;
};

Status Sequence::RunAll() {
  const CallSpec& spec = options_.mix.front();
  SessionOptions options;
  options.shapes = {{spec.dtype, spec.heads_kv, spec.dim, spec.dim_v}};
  options.layers = load_.layers;
  options.tenant = options_.tenant;
  Result<Session> session = Session::Create(client_, options);
  if (!session.ok()) return session.status();
  ++stats_.sessions;
  // A stream goes to one server, which need not be this session's.
  std::unique_ptr<Stream> own;
  if (stream_ != nullptr && client_.several()) {
    own = client_.OpenStream({.tenant = options_.tenant, .server = session->server()});
  }
  Stream* const stream = own == nullptr ? stream_ : own.get();
  History history;
  if (verified_) {
    Result<History> made = History::Make(spec, load_.context + load_.decode);
    if (!made.ok()) return made.status();
    history = std::move(*made);
  }
  const Result<Cost> prompt = Append(*session, load_.context, verified_, nullptr, history);
  if (!prompt.ok()) return prompt.status();
  stats_.prompts_end = NowNs();
  stats_.prompt_ns.Record(prompt->ns);
  ++stats_.prompts;
  if (!forks_) return Decode(*session, stream, history);
  Result<Session> fork = session->Fork();
  if (!fork.ok()) return fork.status();
  ++stats_.sessions;
  ++stats_.forks;
  History forked;
  if (verified_) {
    Result<History> made = History::Make(spec, load_.context + load_.decode);
    if (!made.ok()) return made.status();
    forked = std::move(*made);
    AttentionCall same;
    same.k = history.k;
    same.v = history.v;
    forked.Append(same);
  }
  ATTEND_RETURN_IF_ERROR(Decode(*session, stream, history));
  return Decode(*fork, stream, forked);
}

Status Sequence::Decode(Session& session, Stream* stream, History& history) {
  const double share = kStepsVerified / static_cast<double>(load_.decode);
  for (int64_t step = 0; step < load_.decode && !interrupted_; ++step) {
    Think();
    const bool keep = verified_ && (step + 1 == load_.decode || random_.Uniform() < share);
    const Result<Cost> cost = Append(session, 1, keep, stream, history);
    if (!cost.ok()) return cost.status();
    stats_.steps_begin = std::min(stats_.steps_begin, cost->begin);
    stats_.steps_end = NowNs();
    stats_.step_ns.Record(cost->ns);
    stats_.step_bytes_in += cost->bytes_in;
    stats_.step_bytes_out += cost->bytes_out;
    ++stats_.tokens;
  }
  return Status();
}

double AnswerTensorBytes(const AttentionCall& call) {
  auto bytes = static_cast<double>(AnswerBytes(call));
  if (!call.return_lse) return bytes;
  double rows = 1;
  for (const int64_t dim : LseShape(call)) rows *= static_cast<double>(dim);
  return bytes + rows * sizeof(float);
}

Result<AttentionResult> AttendOn(Stream& stream, Session& session, int32_t layer,
                                 const AttentionCall& call) {
  std::promise<StreamAnswer> answered;
  Session::Send(stream, {&session}, layer, call,
                [&](StreamAnswer answer) { answered.set_value(std::move(answer)); });
  StreamAnswer answer = answered.get_future().get();
  if (!answer.status.ok()) return answer.status;
  return std::move(answer.result);
}

Result<Sequence::Cost> Sequence::Append(Session& session, int64_t tokens, bool keep, Stream* stream,
                                        History& history) {
  CallSpec spec = options_.mix.front();
  spec.len_q = spec.len_k = tokens;
  CallOptions call_options;
  call_options.transport = options_.transport;
  Cost cost;
  for (int32_t layer = 0; layer < load_.layers; ++layer) {
    if (interrupted_) return Status(Code::kCancelled, "interrupted");
    const Result<AttentionCall> call = MakeRandomCall(spec, random_.Bits());
    if (!call.ok()) return call.status();
    const bool remembered = verified_ && layer == layer_verified_;
    call_options.payload = keep && remembered ? Payload::kCopy : Payload::kDiscard;
    const int64_t begin = NowNs();
    Result<AttentionResult> result = stream == nullptr ? session.Attend(layer, *call, call_options)
                                                       : AttendOn(*stream, session, layer, *call);
    if (!result.ok()) return result.status();
    cost.ns += NowNs() - begin;
    if (layer == 0) cost.begin = begin;
    cost.bytes_in += static_cast<double>(PayloadBytes(*call));
    cost.bytes_out += AnswerTensorBytes(*call);
    if (remembered) history.Append(*call);
    if (!keep || !remembered) continue;
    Kept& kept = kept_.emplace_back(Kept{*call, std::move(*result)});
    kept.call.k = history.k;
    kept.call.v = history.v;
  }
  return cost;
}

// Short sleeps, so that an interrupt is noticed.
void Sequence::Think() {
  const auto until = Clock::now() + std::chrono::duration<double, std::milli>(load_.think_ms);
  while (!interrupted_ && Clock::now() < until) {
    const std::chrono::duration<double> left = until - Clock::now();
    std::this_thread::sleep_for(std::min(left, std::chrono::duration<double>(0.05)));
  }
}

// Checks the memory for the inputs held at once and for the histories of `verified` sequences.
Status CheckMemory(const LoadOptions& options, int64_t verified) {
  const SessionLoad& load = options.session;
  CallSpec spec = options.mix.front();
  spec.len_q = spec.len_k = load.context;
  int64_t left = options.input_bytes_max;
  Status fits = TakeInputBytes(spec, load.sessions, &left);
  spec.len_k = load.context + load.decode;
  if (fits.ok()) fits = TakeInputBytes(spec, 2 * verified, &left);
  if (fits.ok()) return fits;
  return InvalidArgument(fits.message() + "; see --sessions, --context and --verify");
}

Status CheckShape(const LoadOptions& options) {
  if (options.mix.size() != 1) {
    return InvalidArgument("--sessions takes one shape, not " + std::to_string(options.mix.size()));
  }
  const CallSpec& spec = options.mix.front();
  if (spec.batch == 1 && spec.layout != v1::LAYOUT_LHD && !spec.ragged && !spec.bias) {
    return Status();
  }
  return InvalidArgument("--shape \"" + spec.text +
                         "\": --sessions excludes B above 1, layout=lhd, ragged and bias");
}

}  // namespace

void SessionLoadStats::Merge(const SessionLoadStats& other) {
  sessions += other.sessions;
  forks += other.forks;
  prompts += other.prompts;
  tokens += other.tokens;
  step_bytes_in += other.step_bytes_in;
  step_bytes_out += other.step_bytes_out;
  prompt_ns.Merge(other.prompt_ns);
  step_ns.Merge(other.step_ns);
  prompts_end = std::max(prompts_end, other.prompts_end);
  steps_begin = std::min(steps_begin, other.steps_begin);
  steps_end = std::max(steps_end, other.steps_end);
  for (const auto& [code, count] : other.failures) failures[code] += count;
  first_message.insert(other.first_message.begin(), other.first_message.end());
  unexpected += other.unexpected;
}

Result<SessionLoadResult> RunSessionLoad(const LoadOptions& given,
                                         const std::atomic<bool>& interrupted) {
  ATTEND_RETURN_IF_ERROR(CheckShape(given));
  LoadOptions options = given;
  CallSpec& spec = options.mix.front();
  // BLHD: tokens are consecutive in memory; causal: each sees those before it.
  spec.layout = v1::LAYOUT_BLHD;
  spec.causal = spec.causal || !spec.window;
  Random random(options.seed);
  std::vector<uint64_t> seeds;
  std::vector<bool> verified;
  for (int64_t i = 0; i < options.session.sessions; ++i) {
    seeds.push_back(random.Bits());
    verified.push_back(random.Uniform() < options.verify_share);
  }
  ATTEND_RETURN_IF_ERROR(CheckMemory(options, std::count(verified.begin(), verified.end(), true)));
  const Result<std::unique_ptr<Client>> client = Client::Make(options.client);
  if (!client.ok()) return client.status();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; options.stream && i < (*client)->connections(); ++i) {
    streams.push_back((*client)->OpenStream({.tenant = options.tenant}));
  }
  std::deque<Sequence> sequences;
  for (size_t i = 0; i < seeds.size(); ++i) {
    Stream* const stream = streams.empty() ? nullptr : streams[i % streams.size()].get();
    sequences.emplace_back(options, **client, stream, interrupted, seeds[i], verified[i]);
  }
  const int64_t begin = NowNs();
  std::vector<std::thread> threads;
  for (Sequence& sequence : sequences) {
    threads.emplace_back([&sequence] {
      NameThread("attend-session");
      sequence.Run();
    });
  }
  SessionLoadResult result;
  result.sessions = options.session.sessions;
  VerifyQueue verify(INT64_MAX);
  for (size_t i = 0; i < threads.size(); ++i) {
    threads[i].join();
    result.stats.Merge(sequences[i].stats());
  }
  for (Sequence& sequence : sequences) sequence.Verify(&verify);
  result.interrupted = interrupted;
  if (result.interrupted) verify.Drop();
  result.verified = verify.Drain();
  const SessionLoadStats& stats = result.stats;
  if (stats.prompts > 0) result.prompts_s = static_cast<double>(stats.prompts_end - begin) * 1e-9;
  if (stats.tokens > 0) {
    result.steps_s = static_cast<double>(stats.steps_end - stats.steps_begin) * 1e-9;
  }
  return result;
}

double SessionLoadResult::prompts_per_s() const {
  return prompts_s > 0 ? static_cast<double>(stats.prompts) / prompts_s : 0;
}
double SessionLoadResult::tokens_per_s() const {
  return steps_s > 0 ? static_cast<double>(stats.tokens) / steps_s : 0;
}
double SessionLoadResult::bytes_in_per_token() const {
  return stats.tokens > 0 ? stats.step_bytes_in / static_cast<double>(stats.tokens) : 0;
}
double SessionLoadResult::bytes_out_per_token() const {
  return stats.tokens > 0 ? stats.step_bytes_out / static_cast<double>(stats.tokens) : 0;
}

}  // namespace attend::client
