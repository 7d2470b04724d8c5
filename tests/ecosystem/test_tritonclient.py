# SPDX-License-Identifier: Apache-2.0
"""The unmodified tritonclient from PyPI: synchronous, streamed, with asyncio, and with system
shared memory. The examples of server/oip/README.md are run as they are."""

import asyncio
import importlib.util
import pathlib
import queue
import re
import subprocess
import sys

import numpy as np
import pytest

grpcclient = pytest.importorskip("tritonclient.grpc")
import tritonclient.grpc.aio as aioclient  # noqa: E402
from google.protobuf import descriptor_pb2  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402
from tritonclient.utils import InferenceServerException, shared_memory as shm  # noqa: E402

import harness  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(name, path):
    """Loads a module under another name, as its own name is taken here."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


reference = load("e2e_reference", ROOT / "tests/e2e/reference.py")
MODEL = "attention_fp32_bhld_causal"


@pytest.fixture(scope="module")
def oip_server(tmp_path_factory):
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    running = harness.Server(tmp_path_factory.mktemp("oip"), "--oip", "--oip-shared-memory",
                             "/attend")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def client(oip_server):
    with grpcclient.InferenceServerClient(oip_server.address) as made:
        yield made


def tensors(seed=0, length=33):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((2, heads, length, 32)).astype(np.float32)
            for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def inputs_of(arrays, module=grpcclient, datatype="FP32"):
    inputs = []
    for name, array in arrays.items():
        made = module.InferInput(name, array.shape, datatype)
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs


def judge(arrays, result, dtype="float32"):
    case = reference.Case(arrays["q"], arrays["k"], arrays["v"], dtype,
                          mask=reference.Mask("causal"))
    reference.judge(case, result.as_numpy("o").astype(np.float32), result.as_numpy("lse"))


def test_infer_and_metadata(client):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert "statistics" in client.get_server_metadata().extensions
    assert client.get_model_metadata(MODEL).name == MODEL
    assert client.get_model_config(MODEL).config.max_batch_size > 0
    assert len(client.get_model_repository_index().models) == 27
    arrays = tensors()
    result = client.infer(MODEL, inputs_of(arrays), request_id="me")
    assert result.get_response().id == "me"
    judge(arrays, result)
    statistics = client.get_inference_statistics(MODEL).model_stats[0]
    assert statistics.inference_stats.success.count == 1


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_dtypes_of_16_bits(client, datatype):
    dtype = {"FP16": "float16", "BF16": "bfloat16"}[datatype]
    arrays = {name: reference.round_to(dtype, array) for name, array in tensors().items()}
    sent = {name: array.astype(np.float16) if datatype == "FP16" else array
            for name, array in arrays.items()}
    if datatype == "BF16":  # newer versions need ml_dtypes' bfloat16
        try:
            inputs = inputs_of(sent, datatype=datatype)
        except InferenceServerException:
            import ml_dtypes
            sent = {name: array.astype(ml_dtypes.bfloat16) for name, array in sent.items()}
            inputs = inputs_of(sent, datatype=datatype)
    else:
        inputs = inputs_of(sent, datatype=datatype)
    result = client.infer(MODEL.replace("fp32", datatype.lower()), inputs)
    judge({name: array.astype(np.float32) for name, array in arrays.items()}, result, dtype)


def test_errors_have_their_status(client):
    arrays = tensors()
    arrays["v"] = arrays["v"][:, :, :-1]
    with pytest.raises(InferenceServerException) as failed:
        client.infer(MODEL, inputs_of(arrays))
    assert failed.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "v.shape[2]" in failed.value.message()
    with pytest.raises(InferenceServerException) as failed:
        client.infer("resnet50", inputs_of(tensors()))
    assert failed.value.status() == "StatusCode.NOT_FOUND"


def test_parameters_timeouts_and_priorities(client):
    arrays = tensors()
    result = client.infer("attention_fp32_bhld", inputs_of(arrays), priority=1,
                          timeout=10_000_000, parameters={"causal": True, "scale": 0.5})
    case = reference.Case(**arrays, mask=reference.Mask("causal"), scale=0.5)
    reference.judge(case, result.as_numpy("o"), result.as_numpy("lse"))
    with pytest.raises(InferenceServerException, match="window_rigth"):
        client.infer("attention_fp32_bhld", inputs_of(arrays), parameters={"window_rigth": 1})


def test_async_infer_and_streams(client):
    done = queue.Queue()
    arrays = tensors()
    client.async_infer(MODEL, inputs_of(arrays), lambda result, error: done.put((result, error)))
    result, error = done.get(timeout=30)
    assert error is None
    judge(arrays, result)
    client.start_stream(lambda result, error: done.put((result, error)))
    many = [tensors(seed, 5 + seed) for seed in range(10)]
    for seed, each in enumerate(many):
        client.async_stream_infer(MODEL if seed != 4 else "none", inputs_of(each),
                                  request_id=str(seed))
    for seed, each in enumerate(many):
        result, error = done.get(timeout=30)
        if seed == 4:
            assert "unknown model: 'none'" in error.message()
            continue
        assert error is None and result.get_response().id == str(seed)
        judge(each, result)
    client.stop_stream()


def test_asyncio(oip_server):
    async def run():
        async with aioclient.InferenceServerClient(oip_server.address) as client:
            assert await client.is_server_ready()
            many = [tensors(seed) for seed in range(8)]
            results = await asyncio.gather(*[client.infer(MODEL, inputs_of(each, aioclient))
                                             for each in many])
            for arrays, result in zip(many, results):
                judge(arrays, result)

            async def requests():
                for arrays in many:
                    yield {"model_name": MODEL, "inputs": inputs_of(arrays, aioclient)}

            index = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None
                judge(many[index], result)
                index += 1
            assert index == len(many)

    asyncio.run(run())


def test_abandoned_calls_end_on_the_server(tmp_path):
    """Long before they would have been computed, in each of three ways: stopping a stream, a
    timeout, and cancelling a call."""
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    server = harness.Server(tmp_path, "--oip", "--lanes", "1")
    done = queue.Queue()
    # The double-precision kernel takes minutes on one core.
    slow = {"inputs": inputs_of({name: np.ones((4, 1, 16384, 32), np.float32) for name in "qkv"}),
            "model_name": MODEL, "parameters": {"kernel": "cpu_reference"}}

    def wait_for_requests(count):
        harness.wait_for(f"{count} requests", lambda: server.metric("attend_inflight_requests")
                         == count, 30)

    def ended(code):
        return server.metric("attend_requests_total", code=code) or 0

    with grpcclient.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: done.put(error))
        for _ in range(3):
            client.async_stream_infer(**slow)
        wait_for_requests(3)
        client.stop_stream(cancel_requests=True)
        assert done.get(timeout=30).status() == "StatusCode.CANCELLED"
        wait_for_requests(0)
        assert ended("CANCELLED") == 3

        with pytest.raises(InferenceServerException) as failed:
            client.infer(**slow, client_timeout=1.0)
        assert failed.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        wait_for_requests(0)
        assert ended("CANCELLED") + ended("DEADLINE_EXCEEDED") == 4

        call = client.async_infer(**slow, callback=lambda result, error: done.put(error))
        wait_for_requests(1)
        call.cancel()
        assert done.get(timeout=30).status() == "StatusCode.CANCELLED"
        wait_for_requests(0)
        assert ended("CANCELLED") + ended("DEADLINE_EXCEEDED") == 5
        assert ended("OK") == 0
        arrays = tensors()
        judge(arrays, client.infer(MODEL, inputs_of(arrays)))
    assert server.stop() == 0, server.log()


@pytest.mark.parametrize("length", [33, 700])
def test_system_shared_memory(client, length):
    arrays = tensors(1, length)
    expected = client.infer(MODEL, inputs_of(arrays)).as_numpy("o")
    size = sum(array.nbytes for array in arrays.values())
    whole = shm.create_shared_memory_region("in", "/attend_in", size)
    answer = shm.create_shared_memory_region("out", "/attend_out", expected.nbytes)
    try:
        shm.set_shared_memory_region(whole, list(arrays.values()))
        client.register_system_shared_memory("in", "/attend_in", size)
        client.register_system_shared_memory("out", "/attend_out", expected.nbytes)
        assert set(client.get_system_shared_memory_status().regions) == {"in", "out"}
        inputs, offset = [], 0
        for name, array in arrays.items():
            made = grpcclient.InferInput(name, array.shape, "FP32")
            made.set_shared_memory("in", array.nbytes, offset)
            offset += array.nbytes
            inputs.append(made)
        output = grpcclient.InferRequestedOutput("o")
        output.set_shared_memory("out", expected.nbytes)
        client.infer(MODEL, inputs, outputs=[output])
        got = shm.get_contents_as_numpy(answer, np.float32, expected.shape)
        assert np.array_equal(got, expected)
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(whole)
        shm.destroy_shared_memory_region(answer)
    assert not client.get_system_shared_memory_status().regions


def files_of(module):
    """The descriptors of a file and its imports by name: {name: {field: (number, type, label,
    type name)}}."""
    found = {}

    def add(prefix, message):
        name = f"{prefix}.{message.name}"
        found[name] = {f.name: (f.number, f.type, f.label, f.type_name) for f in message.field}
        for nested in message.nested_type:
            add(name, nested)

    seen = set()

    def walk(file):
        if file.name in seen:
            return
        seen.add(file.name)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            add(proto.package, message)
        for enum in proto.enum_type:
            found[f"{proto.package}.{enum.name}"] = {v.name: v.number for v in enum.value}
        for service in proto.service:
            found[f"{proto.package}.{service.name}"] = {
                m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming)
                for m in service.method}
        for each in file.dependencies:
            walk(each)

    walk(module)
    return found


# Fields of Triton's messages that ours leave out on purpose, as the server neither reads nor sends
# them. Message types used only by these fields are left out too.
LEFT_OUT = {
    "inference.ModelConfig": {
        "runtime", "version_policy", "batch_input", "batch_output", "optimization",
        "sequence_batching", "ensemble_scheduling", "instance_group", "default_model_filename",
        "cc_model_filenames", "metric_tags", "model_warmup", "model_operations",
        "model_repository_agents", "response_cache", "model_metrics"},
    "inference.ModelDynamicBatching": {
        "preferred_batch_size", "preserve_ordering", "default_queue_policy",
        "priority_queue_policy"},
    "inference.ModelInput": {
        "format", "reshape", "is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io"},
    "inference.ModelOutput": {
        "reshape", "label_filename", "is_shape_tensor", "is_non_linear_format_io"},
    "inference.ModelStatistics": {"memory_usage", "response_stats"},
}


def test_the_proto_has_tritons_names_and_numbers(tmp_path):
    pytest.importorskip("grpc_tools")
    descriptors = tmp_path / "oip.binpb"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}",
                    "--include_imports", f"--descriptor_set_out={descriptors}",
                    "inference/grpc_service.proto"], check=True)
    from google.protobuf import descriptor_pool
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    ours = files_of(pool.FindFileByName("inference/grpc_service.proto"))
    theirs = files_of(service_pb2.DESCRIPTOR)
    assert len(ours) > 60
    for name, fields in ours.items():
        for field, value in fields.items():
            assert theirs[name].get(field) == value, (name, field)
        assert set(theirs[name]) - set(fields) == LEFT_OUT.get(name, set()), name
    assert set(ours["inference.GRPCInferenceService"]) == \
        set(theirs["inference.GRPCInferenceService"])


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def test_the_examples_of_the_page_run(oip_server, tmp_path):
    examples = blocks("server/oip/README.md")
    assert len(examples) >= 3
    text = "\n".join(examples)
    assert text.count("127.0.0.1:8001") >= 1
    done = subprocess.run([sys.executable, "-c",
                           text.replace("127.0.0.1:8001", oip_server.address)],
                          cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
