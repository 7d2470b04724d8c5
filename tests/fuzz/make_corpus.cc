// SPDX-License-Identifier: Apache-2.0
//
// Rewrites the seeds of tests/fuzz/corpus: make_corpus FOLDER. They are small valid inputs of every
// kind, the same on every machine. Inputs with other names, which were findings, are kept.

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/transport_seeds.h"
#include "tests/server/support/infer_messages.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/wire_gradients.h"

namespace attend::fuzz {
namespace {

namespace fs = std::filesystem;

fs::path folder;

void Write(const std::string& target, const std::string& name, const std::string& input) {
  fs::create_directories(folder / target);
  std::ofstream out(folder / target / ("seed-" + name), std::ios::binary);
  out << input;
  ATTEND_FUZZ_REQUIRE(out.good(), target + "/" + name);
}

// Random requests of at most 800 bytes.
std::vector<v1::AttendRequest> SmallRequests(size_t count) {
  std::vector<v1::AttendRequest> requests;
  for (uint64_t seed = 1; requests.size() < count; ++seed) {
    test::WireProblem problem = test::RandomWireProblem(seed, 60, /*trees=*/false);
    const size_t size = problem.request.ByteSizeLong();
    if (size >= 80 && size <= 800) requests.push_back(std::move(problem.request));
  }
  return requests;
}

v1::AttendRequest DroppedRequest() {
  v1::AttendRequest dropped = test::PlainWireProblem(1, 3, 4).request;
  dropped.set_dropout_p(0.25f);
  dropped.set_dropout_seed(~uint64_t{0});
  dropped.mutable_bias()->set_dtype(v1::DTYPE_BIT);
  for (const int64_t dim : {1, 2, 3, 3}) dropped.mutable_bias()->add_shape(dim);
  dropped.add_raw("\1\2\3\4\5\6");
  return dropped;
}

// Two sequences, each with a tree of three tokens, of which the second sequence uses two.
v1::AttendRequest TreeRequest() {
  const test::ProblemSpec spec = test::MakeSpec(2, 2, 1, 3, 4, 2, 2);
  v1::AttendRequest request = test::ToRequest(spec, test::MakeAttention(spec, 1));
  request.set_tree("\1\3\5\1\3\7");
  request.set_tree_tokens(3);
  request.add_tree_lengths(3);
  request.add_tree_lengths(2);
  return request;
}

void Requests() {
  int number = 0;
  for (const v1::AttendRequest& request : SmallRequests(12)) {
    Write("request", std::to_string(number++), Join({request.SerializeAsString()}));
  }
  test::ProblemSpec spec = test::MakeSpec(1, 2, 1, 2, 3, 4, 4);
  spec.problem.has_bias = spec.problem.has_sinks = true;
  const test::WireGradients gradients(spec, 1);
  Write("request", "backward", Join({gradients.request.SerializeAsString()}));
  Write("request", "dropped", Join({DroppedRequest().SerializeAsString()}));
  Write("request", "tree", Join({TreeRequest().SerializeAsString()}));
  // Tensors in the two regions that request_fuzz.cc creates.
  v1::AttendRequest shared = test::PlainWireProblem(1, 2, 4).request;
  shared.clear_raw();
  uint64_t offset = 0;
  for (v1::Tensor* tensor : {shared.mutable_q(), shared.mutable_k(), shared.mutable_v()}) {
    tensor->mutable_shared_memory()->set_region("region-aaaaaaaaa");
    tensor->mutable_shared_memory()->set_offset(std::exchange(offset, offset + 256));
  }
  shared.mutable_o_placement()->mutable_shared_memory()->set_region("region-bbbbbbbbb");
  Write("request", "shared", Join({shared.SerializeAsString()}));
}

// The request as messages of AttendChunked, in chunks of 100 bytes.
std::string InChunks(v1::AttendRequest request) {
  const std::vector<std::string> tensors(request.raw().begin(), request.raw().end());
  request.clear_raw();
  std::vector<std::pair<v1::TensorName, v1::Tensor*>> metas = {
      {v1::TENSOR_NAME_Q, request.mutable_q()}};
  if (request.has_k()) metas.emplace_back(v1::TENSOR_NAME_K, request.mutable_k());
  if (request.has_v()) metas.emplace_back(v1::TENSOR_NAME_V, request.mutable_v());
  if (request.has_bias()) metas.emplace_back(v1::TENSOR_NAME_BIAS, request.mutable_bias());
  std::vector<std::string> messages(1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    metas[i].second->mutable_chunked();
    for (size_t at = 0; at < tensors[i].size(); at += 100) {
      v1::AttendChunkedRequest chunk;
      chunk.set_tensor(metas[i].first);
      chunk.set_offset(at);
      chunk.set_data(tensors[i].substr(at, 100));
      messages.push_back(chunk.SerializeAsString());
    }
  }
  v1::AttendChunkedRequest first;
  *first.mutable_header() = std::move(request);
  messages[0] = first.SerializeAsString();
  return Join(messages);
}

// Requests that read or append to one or both sessions of two_sessions.h.
void Sessions() {
  for (const auto& [name, second, rows] :
       {std::tuple{"session-read", false, 0}, std::tuple{"session-append", false, 2},
        std::tuple{"session-append-both", true, 1}}) {
    v1::AttendRequest request;
    const int batch = second ? 2 : 1;
    const auto fill = [&](v1::Tensor* tensor, int heads, int length, int dim) {
      tensor->set_dtype(v1::DTYPE_FLOAT16);
      for (const int size : {batch, heads, length, dim}) tensor->add_shape(size);
      request.add_raw(std::string(static_cast<size_t>(2 * batch * heads * length * dim), 'a'));
    };
    fill(request.mutable_q(), 4, 1, 4);
    if (rows > 0) {
      fill(request.mutable_k(), 2, rows, 4);
      fill(request.mutable_v(), 2, rows, 2);
    }
    for (const auto& [id, length] : {std::pair{"session-a", 70}, std::pair{"session-b", 3}}) {
      if (request.sessions_size() == batch) break;
      v1::SessionUse* const use = request.add_sessions();
      use->set_session(id);
      use->set_length(length);
      if (rows > 0) use->set_append_id("seed");
    }
    Write("request", name, Join({request.SerializeAsString()}));
    Write("chunked", name, InChunks(request));
  }
}

void Chunked() {
  int number = 0;
  for (const v1::AttendRequest& request : SmallRequests(6)) {
    Write("chunked", std::to_string(number++), InChunks(request));
  }
  v1::AttendChunkedRequest token;
  token.set_token("0123456789abcdef");
  Write("chunked", "token", Join({token.SerializeAsString()}));
}

void Regions() {
  v1::RegionRequest create, import, release;
  create.mutable_create()->set_bytes(5000);
  release.mutable_release()->set_token("token-0000000000");
  import.mutable_import_cuda()->set_device_uuid(std::string(16, 'u'));
  import.mutable_import_cuda()->set_memory_handle(std::string(64, 'h'));
  import.mutable_import_cuda()->set_bytes(4096);
  const std::string made = create.SerializeAsString();
  const std::string gone = release.SerializeAsString();
  Write("regions", "create-release", Join({made, gone, made, made, gone}));
  Write("regions", "import", Join({import.SerializeAsString(), made}));
  Write("regions", "none", Join({std::string(1, '\0'), made}));
  Write("regions", "many", Join({made, made, made, made, made}));
}

void Settings() {
  const std::pair<const char*, const char*> texts[] = {
      {"values", "1.5GiB\n64 MiB\n4096\n[::1]:80\nunix:/run/a.sock\ncuda:0,1,cpu\nsample:0.25\n"},
      {"arguments",
       "--listen=127.0.0.1:0,unix:/tmp/a\n--memory-budget=64MiB\n--max-queue=7\n"
       "--log-format=json\n--metrics-listen=off\n"},
      {"tenants", "--tenant=team-a=3\n--tenant=team.b=1\n--priority-aging-ms=10\n"},
      {"pairs", "--listen\nlocalhost:8001\n--device\ncpu\n--reference-check\nall\n"},
      {"file", "listen = \"127.0.0.1:0\"\nmax-queue = 5\ntenant = [\"a=1\", \"b=2\"]\n"},
      {"ini", "; words\nmemory-budget=64MiB\nshared-memory=true\ncuda-ipc=true\n"},
      {"limits",
       "requests-in-flight = 64 # of all\nbytes-per-second = \"1GiB\"\n\n[\"prod.eu-1\"]\n"
       "gflop-per-second = 0.5\ngflop-burst = 2e3\nchecks = none\n[a]\nsession-memory = 64MiB\n"
       "bytes-burst = 4096\n"},
      {"help", "--help\n"},
      {"wrong", "--max-queue=0\n"},
  };
  for (const auto& [name, text] : texts) Write("settings", name, text);
}

void Connections() {
  Write("connections", "get", "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
  Write("connections", "head", "HEAD /other?x HTTP/1.0\n\n");
}

void Transports() {
  for (const auto& [name, input] : TransportSeeds()) Write("transport", name, input);
}

void Names() {
  Write("names", "plain", "request-7");
  Write("names", "tenant", "team-b");
  Write("names", "forged", "x\" code=\"OK\" \\\n2024-05-06T07:08:09.123456Z error");
  Write("names", "path", "../../etc/passwd");
  Write("names", "turned", "a\u202eb\u009bc\u200bd\xff");
}

void FillAnswer(v1::AttendResponse* answer) {
  answer->set_request_id("a");
  answer->mutable_o()->set_dtype(v1::DTYPE_FLOAT16);
  for (const int64_t dim : {1, 2, 4, 8}) answer->mutable_o()->add_shape(dim);
  answer->mutable_o()->set_byte_length(128);
  answer->mutable_lse()->set_dtype(v1::DTYPE_FLOAT32);
  for (const int64_t dim : {1, 2, 4}) answer->mutable_lse()->add_shape(dim);
  answer->mutable_timings()->set_total_ns(5);
  answer->set_kernel("cpu_flash");
  answer->mutable_check()->set_ok(true);
}

void Answers() {
  v1::AttendResponse answer;
  FillAnswer(&answer);
  v1::AttendChunkedResponse grant, header, o, lse;
  grant.mutable_grant()->set_token("0123456789abcdef");
  grant.mutable_grant()->set_streams_max(4);
  *header.mutable_response() = answer;
  o.set_tensor(v1::TENSOR_NAME_O);
  o.set_data(std::string(64, 'o'));
  v1::AttendChunkedResponse o2 = o;
  o2.set_offset(64);
  lse.set_tensor(v1::TENSOR_NAME_LSE);
  lse.set_data(std::string(32, 'l'));
  Write("answer", "chunked",
        Join({grant.SerializeAsString(), header.SerializeAsString(), o.SerializeAsString(),
              o2.SerializeAsString(), lse.SerializeAsString()}));
  Write("answer", "early",
        Join({o2.SerializeAsString(), lse.SerializeAsString(), header.SerializeAsString(),
              o.SerializeAsString()}));
  answer.add_raw(std::string(128, 'o'));
  answer.add_raw(std::string(32, 'l'));
  Write("answer", "whole", Join({answer.SerializeAsString()}));
  answer.mutable_o()->mutable_shared_memory()->set_region("0123456789abcdef");
  Write("answer", "shared", Join({answer.SerializeAsString()}));
  v1::AttendResponse failed;
  failed.mutable_status()->set_code(8);
  failed.mutable_status()->set_message("full");
  failed.mutable_status()->set_retry_after_ms(20);
  Write("answer", "failed", Join({failed.SerializeAsString()}));
  Write("answer", "pushback", Join({"250", "-1", "soon"}));
}

std::string ReadAndRemove(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  fs::remove(path);
  return bytes;
}

// Boolean tensors, which attend-client can read but not write.
void Booleans() {
  const std::string values("\1\0\1\1\0\0\0\1\1\1", 10);
  std::string header = "{'descr': '|b1', 'fortran_order': False, 'shape': (1, 1, 2, 5), }";
  header.resize(117, ' ');  // 128 bytes with the magic string and the line feed
  Write("files", "npy-b1", std::string("\x93NUMPY\1\0v\0", 10) + header + "\n" + values);
  const std::string json = R"({"q":{"dtype":"BOOL","shape":[1,1,2,5],"data_offsets":[0,10]}})";
  Write("files", "safetensors-bool",
        static_cast<char>(json.size()) + std::string(7, '\0') + json + values);
}

void Files() {
  const fs::path scratch = folder / "scratch";
  for (const auto& [name, dtype] :
       {std::pair{"npy-f2", DType::kFloat16}, std::pair{"npy-f4", DType::kFloat32}}) {
    const auto tensor = client::HostTensor::Make("t", dtype, {2, 3});
    std::fill_n(tensor->data.get(), tensor->bytes, std::byte{1});
    ATTEND_FUZZ_REQUIRE(client::WriteNpy(scratch, *tensor).ok(), name);
    Write("files", name, ReadAndRemove(scratch));
  }
  std::map<std::string, client::HostTensor> tensors;
  for (const char* name : {"q", "k", "other"}) {
    const auto tensor = client::HostTensor::Make("t", DType::kBFloat16, {2, 2});
    std::fill_n(tensor->data.get(), tensor->bytes, std::byte{2});
    tensors.emplace(name, *tensor);
  }
  ATTEND_FUZZ_REQUIRE(client::WriteSafetensors(scratch, tensors).ok(), "safetensors");
  Write("files", "safetensors", ReadAndRemove(scratch));
  Write("files", "spec", "B2,H4,Hkv2,L8,D16,Dv4,dtype=bfloat16,layout=lhd,ragged,causal,lse");
  Write("files", "spec-terms",
        "Lq=3,Lk5,window=2:-1,top-left,scale=0.5,softcap=30,bias,alibi,sinks,kernel=cpu_flash");
  Write("files", "spec-dropped", "L5,bits,dropout=0.25,backward");
  Write("files", "mix", R"({"shapes": ["B1,L4", {"H": 2, "causal": true, "weight": 3}]})");
  int number = 0;
  for (const v1::AttendRequest& request : SmallRequests(4)) {
    Write("files", "dump-" + std::to_string(number++), request.SerializeAsString());
  }
  Write("files", "dump-dropped", DroppedRequest().SerializeAsString());
  Booleans();
}

void Infers() {
  std::mt19937_64 random(1);
  std::vector<inference::ModelInferRequest> infers;
  for (const v1::AttendRequest& request : SmallRequests(16)) {
    if (test::IsInferable(request)) infers.push_back(test::ToInfer(request, random));
  }
  for (auto& each : test::InfersInRegion("r")) infers.push_back(std::move(each));
  for (size_t i = 0; i < infers.size(); ++i) {
    Write("infer", std::to_string(i), Join({infers[i].SerializeAsString()}));
  }
  Write("infer", "plain", Join({test::PlainInfer().SerializeAsString()}));
}

}  // namespace
}  // namespace attend::fuzz

// Stands in for libFuzzer, which is not linked because it has its own main(). Never called here.
extern "C" size_t LLVMFuzzerMutate(uint8_t*, size_t size, size_t) { return size; }

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "make_corpus FOLDER\n");
    return 2;
  }
  attend::fuzz::folder = argv[1];
  using namespace attend::fuzz;
  for (void (*const write)() : {Requests, Infers, Sessions, Chunked, Regions, Settings, Connections,
                                Transports, Names, Answers, Files}) {
    write();
  }
  return 0;
}
