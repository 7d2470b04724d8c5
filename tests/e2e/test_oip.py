# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol with stubs generated from the project's own proto, used like every
client of KServe or Triton. tests/ecosystem has the client libraries themselves."""

import contextlib
import mmap
import os
import secrets
import signal

import grpc
import numpy as np
import pytest

import harness
import wire
from reference import Case, Mask, from_bytes, judge, round_to, to_bytes

DTYPES = {"BF16": "bfloat16", "FP16": "float16", "FP32": "float32"}
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def oip_server(tmp_path_factory):
    running = harness.Server(tmp_path_factory.mktemp("oip"), "--oip", "--oip-shared-memory",
                             "/attend-test-", "--oip-shared-memory-bytes", "64MiB",
                             "--tenant", "a=1,b=1,a-b=1")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def oip(oip_server):
    with grpc.insecure_channel(oip_server.address, options=wire.UNLIMITED) as channel:
        yield wire.oip_stub.GRPCInferenceServiceStub(channel)


def tensors(random, dtype="FP32", b=2, hq=4, hkv=2, l=17, d=32):
    """q, k and v in BHLD, as the dtype rounds them."""
    name = DTYPES[dtype]
    return [round_to(name, random.standard_normal((b, h, l, d)).astype(np.float32))
            for h in (hq, hkv, hkv)]


def infer_request(model, inputs, dtype="FP32", outputs=(), **parameters):
    """`inputs`: [(name, array)]; integers are sent as INT32."""
    request = wire.oip_pb.ModelInferRequest(model_name=model, id="r1")
    for name, array in inputs:
        whole = array.dtype.kind == "i"
        request.inputs.add(name=name, datatype="INT32" if whole else dtype, shape=array.shape)
        request.raw_input_contents.append(
            array.astype(np.int32).tobytes() if whole else to_bytes(DTYPES[dtype], array))
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param",
                str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def output(response, name):
    index, = [i for i, each in enumerate(response.outputs) if each.name == name]
    each = response.outputs[index]
    return from_bytes(DTYPES[each.datatype], response.raw_output_contents[index], each.shape)


def refused(call, request, code, part):
    with pytest.raises(grpc.RpcError) as failed:
        call(request, timeout=wire.SECONDS)
    assert failed.value.code() == code, failed.value
    assert part in failed.value.details(), failed.value.details()


def test_metadata_of_the_server_and_its_models(oip):
    pb = wire.oip_pb
    assert oip.ServerLive(pb.ServerLiveRequest()).live
    assert oip.ServerReady(pb.ServerReadyRequest()).ready
    about = oip.ServerMetadata(pb.ServerMetadataRequest())
    assert about.name == "attend" and about.version
    assert {"statistics", "system_shared_memory"} <= set(about.extensions)
    assert "cuda_shared_memory" not in about.extensions
    index = oip.RepositoryIndex(pb.RepositoryIndexRequest()).models
    assert len(index) == 27 and all(each.state == "READY" for each in index)
    for each in index:
        name = each.name
        assert oip.ModelReady(pb.ModelReadyRequest(name=name)).ready
        metadata = oip.ModelMetadata(pb.ModelMetadataRequest(name=name))
        config = oip.ModelConfig(pb.ModelConfigRequest(name=name)).config
        assert list(metadata.versions) == ["1"] and config.name == name
        assert [i.name for i in metadata.inputs] == [i.name for i in config.input]
    assert not oip.ModelReady(pb.ModelReadyRequest(name="resnet")).ready
    assert not oip.ModelReady(pb.ModelReadyRequest(name=name, version="2")).ready
    refused(oip.ModelMetadata, pb.ModelMetadataRequest(name="resnet"),
            grpc.StatusCode.NOT_FOUND, "unknown model: 'resnet'")


def test_missing_methods_are_unimplemented(oip):
    pb = wire.oip_pb
    for call, request in ((oip.RepositoryModelLoad, pb.RepositoryModelLoadRequest()),
                          (oip.RepositoryModelUnload, pb.RepositoryModelUnloadRequest()),
                          (oip.CudaSharedMemoryRegister,
                           pb.CudaSharedMemoryRegisterRequest(name="x", byte_size=1))):
        refused(call, request, grpc.StatusCode.UNIMPLEMENTED, "")


def test_settings_of_traces_and_logs_are_echoed(oip):
    pb = wire.oip_pb
    assert list(oip.TraceSetting(pb.TraceSettingRequest()).settings["trace_level"].value) == ["OFF"]
    trace = pb.TraceSettingRequest()
    trace.settings["trace_rate"].value.append("10")
    trace.settings["trace_level"].value.extend(["TIMESTAMPS", "TENSORS"])
    answer = oip.TraceSetting(trace).settings
    assert {name: list(each.value) for name, each in answer.items()} == \
        {"trace_rate": ["10"], "trace_level": ["TIMESTAMPS", "TENSORS"]}
    log = pb.LogSettingsRequest()
    log.settings["log_info"].bool_param = False
    log.settings["log_verbose_level"].uint32_param = 2
    log.settings["log_format"].string_param = "ISO8601"
    answer = oip.LogSettings(log).settings
    assert answer["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert not answer["log_info"].bool_param
    assert answer["log_verbose_level"].uint32_param == 2
    assert answer["log_format"].string_param == "ISO8601" and len(answer) == 3


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_causal_and_full_attention(oip, random, dtype, layout):
    q, k, v = tensors(random, dtype)
    swap = (lambda x: x) if layout == "bhld" else (lambda x: x.transpose(0, 2, 1, 3))
    inputs = [(n, np.ascontiguousarray(swap(x))) for n, x in (("q", q), ("k", k), ("v", v))]
    for mask in ("full", "causal"):
        model = f"attention_{dtype.lower()}_{layout}_{mask}"
        response = oip.ModelInfer(infer_request(model, inputs, dtype), timeout=wire.SECONDS)
        assert (response.model_name, response.model_version, response.id) == (model, "1", "r1")
        assert [each.name for each in response.outputs] == ["o", "lse"]
        case = Case(q, k, v, DTYPES[dtype], Mask("causal" if mask == "causal" else "none"))
        judge(case, swap(output(response, "o")), output(response, "lse"))


def test_answers_are_those_of_attend_bit_for_bit(oip, oip_server, random):
    q, k, v = tensors(random, "BF16")
    response = oip.ModelInfer(
        infer_request("attention_bf16_bhld_causal", [("q", q), ("k", k), ("v", v)], "BF16",
                      window_left=5, scale="0.25", softcap=30.0), timeout=wire.SECONDS)
    pb = wire.pb
    request = pb.AttendRequest(
        scale=0.25, softcap=30, return_lse=True,
        mask=pb.Mask(kind=pb.Mask.KIND_CAUSAL_BOTTOM_RIGHT, window_left=5))
    for name, array in (("q", q), ("k", k), ("v", v)):
        getattr(request, name).CopyFrom(wire.tensor("bfloat16", array.shape))
        request.raw.append(to_bytes("bfloat16", array))
    with wire.connect(oip_server.address) as service:
        expected = service.Attend(request, timeout=wire.SECONDS)
    assert list(response.raw_output_contents) == list(expected.raw)


def test_packed_sequences(oip, random):
    lengths = [3, 0, 9, 5]
    rows = sum(lengths)
    cu = np.cumsum([0] + lengths)
    q, k, v = [random.standard_normal((rows, h, 16)).astype(np.float32) for h in (4, 2, 2)]
    response = oip.ModelInfer(
        infer_request("attention_fp32_packed_causal",
                      [("cu_q", cu), ("q", q), ("k", k), ("v", v), ("cu_kv", cu)], outputs=["o"]),
        timeout=wire.SECONDS)
    assert len(response.outputs) == 1
    o = output(response, "o")
    for begin, end in zip(cu, cu[1:]):
        if begin == end:
            continue
        one = [x[begin:end].transpose(1, 0, 2)[None] for x in (q, k, v)]
        judge(Case(*one, mask=Mask("causal")), o[begin:end].transpose(1, 0, 2)[None])


def test_statistics_count_requests(oip, random):
    def statistics():
        answer = oip.ModelStatistics(wire.oip_pb.ModelStatisticsRequest(name=model))
        return answer.model_stats[0]

    model = "attention_fp16_blhd_full"
    q, k, v = tensors(random, "FP16")
    before = statistics()
    for _ in range(3):
        oip.ModelInfer(infer_request(model, [("q", q), ("k", k), ("v", v)], "FP16"),
                       timeout=wire.SECONDS)
    refused(oip.ModelInfer, infer_request(model, [("q", q), ("k", k)], "FP16"),
            grpc.StatusCode.INVALID_ARGUMENT, "input 'v' is missing")
    after = statistics()
    assert int(after.version) == 1
    assert after.inference_count - before.inference_count == 3 * q.shape[0]
    assert after.execution_count > before.execution_count
    batches = [{each.batch_size: each.compute_infer.count for each in now.batch_stats}
               for now in (before, after)]
    assert batches[1] == {q.shape[0]: batches[0].get(q.shape[0], 0) + 3}  # sequences, not requests
    phases = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    for phase in phases:
        rose = getattr(after.inference_stats, phase).count \
            - getattr(before.inference_stats, phase).count
        assert rose == 3, phase
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns


def test_probes_of_kserve_and_kubernetes(start_server):
    """While a request runs, the draining server reports that it is live and not ready."""
    server = start_server("--oip", "--lanes", "1")
    pb = wire.oip_pb
    with wire.connect(server.address) as service, grpc.insecure_channel(server.address) as channel:
        stub = wire.oip_stub.GRPCInferenceServiceStub(channel)

        def health(service):
            request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
            return channel.unary_unary(HEALTH)(request, timeout=wire.SECONDS)

        def ready():
            return stub.ServerReady(pb.ServerReadyRequest(), timeout=wire.SECONDS).ready

        def model_ready():
            return stub.ModelReady(pb.ModelReadyRequest(name="attention_fp32_bhld"),
                                   timeout=wire.SECONDS).ready

        for name in ("", "inference.GRPCInferenceService"):
            assert health(name) == b"\x08\x01"  # SERVING
        assert ready() and model_ready()
        slow = service.Attend.future(wire.slow_request(8192), timeout=60)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        server.signal(signal.SIGTERM)
        harness.wait_for("ServerReady to turn", lambda: not ready())
        assert not model_ready()
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=wire.SECONDS).live
        for name in ("", "inference.GRPCInferenceService"):
            assert health(name) == b"\x08\x02"  # NOT_SERVING
        assert not slow.done()
        slow.result()
    assert server.wait() == 0


def test_oip_is_disabled_by_default(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = wire.oip_stub.GRPCInferenceServiceStub(channel)
        refused(stub.ServerLive, wire.oip_pb.ServerLiveRequest(), grpc.StatusCode.UNIMPLEMENTED,
                "")


@contextlib.contextmanager
def shared(prefix, size):
    """A file like those of shm_open, and its contents."""
    key = f"/{prefix}{secrets.token_hex(8)}"
    path = "/dev/shm" + key
    try:
        with open(path, "w+b") as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), min(size, 1 << 30)) as view:
                yield key, view
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def in_region(entry, name, size, offset=0):
    entry.parameters["shared_memory_region"].string_param = name
    entry.parameters["shared_memory_byte_size"].int64_param = size
    if offset:
        entry.parameters["shared_memory_offset"].int64_param = offset


@pytest.mark.parametrize("length", [17, 600])  # copied by gRPC's thread, and by others
def test_system_shared_memory(oip, random, length):
    pb = wire.oip_pb
    q, k, v = tensors(random, l=length)
    request = infer_request("attention_fp32_bhld_full", [("q", q), ("k", k), ("v", v)])
    expected = oip.ModelInfer(request, timeout=wire.SECONDS)
    o_bytes = len(expected.raw_output_contents[0])
    size = q.nbytes + k.nbytes + v.nbytes + o_bytes + 8
    with shared("attend-test-default:", size) as (key, view):
        oip.SystemSharedMemoryRegister(
            pb.SystemSharedMemoryRegisterRequest(name="r", key=key, offset=8, byte_size=size - 8))
        status = oip.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert status.regions["r"].key == key and status.regions["r"].byte_size == size - 8
        del request.raw_input_contents[:]
        at = 0
        for each, array in zip(request.inputs, (q, k, v)):
            view[8 + at:8 + at + array.nbytes] = array.tobytes()
            in_region(each, "r", array.nbytes, at)
            at += array.nbytes
        request.outputs.add(name="lse")
        in_region(request.outputs.add(name="o"), "r", o_bytes, at)
        response = oip.ModelInfer(request, timeout=wire.SECONDS)
        assert [each.name for each in response.outputs] == ["lse", "o"]
        assert response.raw_output_contents[0] == expected.raw_output_contents[1]
        assert response.raw_output_contents[1] == b""
        assert view[8 + at:8 + at + o_bytes] == expected.raw_output_contents[0]

        # Tensors that do not fit are refused before anything is computed.
        request.outputs[1].parameters["shared_memory_byte_size"].int64_param = o_bytes - 1
        refused(oip.ModelInfer, request, grpc.StatusCode.INVALID_ARGUMENT, "should be at least")
        request.outputs[1].parameters["shared_memory_byte_size"].int64_param = o_bytes
        request.outputs[1].parameters["shared_memory_offset"].int64_param = at + 1
        refused(oip.ModelInfer, request, grpc.StatusCode.INVALID_ARGUMENT,
                "Invalid offset + byte size")
        # The client truncates its file: this is an error, and the server does not extend the file.
        request.outputs[1].parameters["shared_memory_offset"].int64_param = at
        os.truncate("/dev/shm" + key, size - o_bytes)
        refused(oip.ModelInfer, request, grpc.StatusCode.INVALID_ARGUMENT, f"key {key} has")
        os.truncate("/dev/shm" + key, 16)
        refused(oip.ModelInfer, request, grpc.StatusCode.INVALID_ARGUMENT, f"key {key} has 16")
        assert os.stat("/dev/shm" + key).st_size == 16
        oip.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))
        refused(oip.ModelInfer, request, grpc.StatusCode.NOT_FOUND, "'r'")
