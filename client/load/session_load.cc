// SPDX-License-Identifier: Apache-2.0

#include "client/load/session_load.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "client/load/token_history.h"
#include "client/load/true_time.h"
#include "client/session.h"
#include "kernels/util/thread_name.h"

namespace attend::client {
namespace {

// Expected and largest numbers of verified steps of a verified sequence, besides its prompt and
// last step.
constexpr double kStepsVerified = 8;
constexpr int64_t kStepsVerifiedMax = 16;

// Tokens that a step appends: of the draft, or one.
int64_t StepTokens(const CallSpec& spec) { return std::max<int64_t>(1, spec.tree); }

// Tokens of a sequence at most.
int64_t Capacity(const LoadOptions& options) {
  return options.session.context + options.session.decode * StepTokens(options.mix.front());
}

// A random token of the tree, and those that it sees: a path from a root.
std::vector<int64_t> RandomPath(const TensorRef& tree, Random& random) {
  const int64_t tokens = tree.shape[2];
  const auto* const row =
      static_cast<const uint8_t*>(tree.data) + random.Below(tokens) * RowBytes(DType::kBit, tokens);
  std::vector<int64_t> path;
  for (int64_t token = 0; token < tokens; ++token) {
    if ((row[token / 8] >> (token % 8) & 1) != 0) path.push_back(token);
  }
  return path;
}

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
  Status Decode(Session& session, Stream* stream, TokenHistory& history);
  // A prompt, or with `tree` not null a step, on all layers: makes fresh data, then calls. `keep`:
  // keep the answer for verification. `*tree`: that of a step's draft, if the shape has one.
  struct Cost {
    int64_t begin = 0;    // first call's send
    int64_t ns = 0;       // of the calls only
    double bytes_in = 0;  // of tensors, to the server
    double bytes_out = 0;
  };
  Result<Cost> Append(Session& session, bool keep, Stream* stream, TokenHistory& history,
                      std::optional<TensorRef>* tree);
  // Keeps a random path of the draft. Returns its tokens.
  Result<int64_t> KeepPath(Session& session, const TensorRef& tree, TokenHistory& history,
                           Cost* cost);
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
  TokenHistory history;
  if (verified_) {
    Result<TokenHistory> made = TokenHistory::Make(spec, Capacity(options_));
    if (!made.ok()) return made.status();
    history = std::move(*made);
  }
  const Result<Cost> prompt = Append(*session, verified_, nullptr, history, nullptr);
  if (!prompt.ok()) return prompt.status();
  stats_.prompts_end = NowNs();
  stats_.prompt_ns.Record(prompt->ns);
  ++stats_.prompts;
  if (!forks_) return Decode(*session, stream, history);
  Result<Session> fork = session->Fork();
  if (!fork.ok()) return fork.status();
  ++stats_.sessions;
  ++stats_.forks;
  TokenHistory forked;
  if (verified_) {
    Result<TokenHistory> made = history.Copy(spec, Capacity(options_));
    if (!made.ok()) return made.status();
    forked = std::move(*made);
  }
  ATTEND_RETURN_IF_ERROR(Decode(*session, stream, history));
  return Decode(*fork, stream, forked);
}

Status Sequence::Decode(Session& session, Stream* stream, TokenHistory& history) {
  const double share = kStepsVerified / static_cast<double>(load_.decode);
  int64_t may_keep = kStepsVerifiedMax;
  for (int64_t step = 0; step < load_.decode && !interrupted_; ++step) {
    Think();
    const bool last = step + 1 == load_.decode;
    const bool keep = verified_ && (last || (random_.Uniform() < share && may_keep-- > 0));
    std::optional<TensorRef> tree;
    Result<Cost> cost = Append(session, keep, stream, history, &tree);
    if (!cost.ok()) return cost.status();
    const Result<int64_t> tokens = tree ? KeepPath(session, *tree, history, &*cost) : 1;
    if (!tokens.ok()) return tokens.status();
    stats_.steps_begin = std::min(stats_.steps_begin, cost->begin);
    stats_.steps_end = NowNs();
    stats_.step_ns.Record(cost->ns);
    stats_.step_bytes_in += cost->bytes_in;
    stats_.step_bytes_out += cost->bytes_out;
    stats_.tokens += *tokens;
  }
  return Status();
}

Result<int64_t> Sequence::KeepPath(Session& session, const TensorRef& tree, TokenHistory& history,
                                   Cost* cost) {
  const std::vector<int64_t> kept = RandomPath(tree, random_);
  const int64_t length = session.length() - tree.shape[2];
  const int64_t begin = NowNs();
  ATTEND_RETURN_IF_ERROR(session.KeepDraft(length, kept));
  cost->ns += NowNs() - begin;
  if (verified_) history.KeepDraft(length, kept);
  return std::ssize(kept);
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

Result<Sequence::Cost> Sequence::Append(Session& session, bool keep, Stream* stream,
                                        TokenHistory& history, std::optional<TensorRef>* tree) {
  CallSpec spec = options_.mix.front();
  spec.len_q = spec.len_k = tree == nullptr ? load_.context : StepTokens(spec);
  if (tree == nullptr) spec.tree = 0;
  CallOptions call_options;
  call_options.transport = options_.transport;
  Cost cost;
  for (int32_t layer = 0; layer < load_.layers; ++layer) {
    if (interrupted_) return Status(Code::kCancelled, "interrupted");
    Result<AttentionCall> call = MakeRandomCall(spec, random_.Bits());
    if (!call.ok()) return call.status();
    // All layers have the same draft.
    if (spec.tree > 0 && layer == 0) *tree = call->tree;
    if (spec.tree > 0) call->tree = *tree;
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
    if (remembered) history.Append(call->k, call->v);
    if (!keep || !remembered) continue;
    Kept& kept = kept_.emplace_back(Kept{*call, std::move(*result)});
    // The next step overwrites the tokens of this draft that are not kept.
    Result<TokenHistory> all =
        spec.tree > 0 ? history.Copy(spec, history.k.shape[1]) : Result<TokenHistory>(history);
    if (!all.ok()) return all.status();
    kept.call.k = std::move(all->k);
    kept.call.v = std::move(all->v);
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
  spec.len_q = spec.len_k = std::max(load.context, spec.tree);
  int64_t left = options.input_bytes_max;
  Status fits = TakeInputBytes(spec, load.sessions, &left);
  spec.len_k = Capacity(options);
  const int64_t copies = spec.tree > 0 ? 2 + kStepsVerifiedMax : 1;
  if (fits.ok()) fits = TakeInputBytes(spec, 2 * verified * copies, &left);
  if (fits.ok()) return fits;
  return InvalidArgument(fits.message() + "; see --sessions, --context and --verify");
}

Status CheckShape(const LoadOptions& options) {
  if (options.mix.size() != 1) {
    return InvalidArgument("--sessions takes one shape, not " + std::to_string(options.mix.size()));
  }
  const CallSpec& spec = options.mix.front();
  if (spec.batch == 1 && spec.call.layout != v1::LAYOUT_LHD && !spec.ragged && !spec.bias &&
      !spec.bits) {
    return Status();
  }
  return InvalidArgument("--shape \"" + spec.text +
                         "\": --sessions excludes B above 1, layout=lhd, ragged, bias and bits");
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
  spec.call.layout = v1::LAYOUT_BLHD;
  spec.causal = spec.causal || !spec.call.mask.window_left;
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
