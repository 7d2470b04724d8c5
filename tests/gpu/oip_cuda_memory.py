#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CUDA shared memory of the Open Inference Protocol, with tritonclient from PyPI:

    oip_cuda_memory.py SERVER_ADDRESS

q, k, v and o are in memory that this process allocates on the first GPU and registers with the
server (--oip --oip-cuda-shared-memory). The answers must be bit-identical to those of Attend and of
ModelInfer with inline tensors. `attend` must be on PYTHONPATH. Exit code 77: tritonclient or
cuda-bindings is not installed."""

import sys

try:
    import numpy as np
    import tritonclient.grpc as triton
    import tritonclient.utils.cuda_shared_memory as cuda
except (ImportError, RuntimeError) as missing:
    print(f"no client: {missing}")
    sys.exit(77)

import attend

MODEL = "attention_fp16_bhld_causal"
GPU = 0
# A batch, more rows than a tile, and decoding.
SHAPES = [((2, 8, 64, 64), (2, 2, 64, 64)), ((1, 4, 1000, 128), (1, 4, 1000, 128)),
          ((3, 8, 1, 64), (3, 2, 517, 64))]


def aligned(count):
    return -(-count // 256) * 256


def inline(client, arrays):
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "FP16"))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer(MODEL, inputs)
    return result.as_numpy("o"), result.as_numpy("lse")


class Memory:
    """GPU memory that is registered with the server under a name."""

    def __init__(self, client, name, size):
        self.client, self.name = client, name
        self.region = cuda.create_shared_memory_region(name, size, GPU)
        client.register_cuda_shared_memory(name, cuda.get_raw_handle(self.region), GPU, size)

    def free(self):
        """Frees the memory, which the server has closed once unregistering returns."""
        self.client.unregister_cuda_shared_memory(self.name)
        cuda.destroy_shared_memory_region(self.region)


def in_memory(client, whole, answer, arrays, expected):
    """The same call with its tensors in `whole` and `answer`; returns O from there, and LSE."""
    cuda.set_shared_memory_region(answer.region, [np.full(expected.shape, np.nan, np.float16)])
    inputs, offset, padded = [], 0, []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "FP16"))
        inputs[-1].set_shared_memory(whole.name, array.nbytes, offset)
        padded.append(np.zeros(aligned(array.nbytes), np.uint8))
        padded[-1][:array.nbytes] = array.reshape(-1).view(np.uint8)
        offset += aligned(array.nbytes)
    cuda.set_shared_memory_region(whole.region, padded)
    output = triton.InferRequestedOutput("o")
    output.set_shared_memory(answer.name, expected.nbytes)
    result = client.infer(MODEL, inputs, outputs=[output, triton.InferRequestedOutput("lse")])
    return (cuda.get_contents_as_numpy(answer.region, np.float16, expected.shape),
            result.as_numpy("lse"))


def check(client, service, seed, shape_q, shape_kv):
    random = np.random.default_rng(seed)
    arrays = {name: random.standard_normal(shape).astype(np.float16)
              for name, shape in (("q", shape_q), ("k", shape_kv), ("v", shape_kv))}
    o, lse = service.attention(*arrays.values(), causal=True, return_lse=True, check=True)
    whole = Memory(client, "in", sum(aligned(array.nbytes) for array in arrays.values()))
    answer = Memory(client, "out", o.nbytes)
    assert set(client.get_cuda_shared_memory_status().regions) == {"in", "out"}
    for other_o, other_lse in (inline(client, arrays),
                               in_memory(client, whole, answer, arrays, o)):
        assert np.isfinite(o).all() and np.isfinite(lse).all()
        assert o.tobytes() == other_o.tobytes(), "O differs"
        assert lse.tobytes() == other_lse.tobytes(), "LSE differs"
    whole.free()
    answer.free()
    assert not client.get_cuda_shared_memory_status().regions
    print(f"q {shape_q}, k and v {shape_kv}: the same bits")


def main():
    address, = sys.argv[1:]
    with triton.InferenceServerClient(address) as client, attend.Client(address) as service:
        assert "cuda_shared_memory" in client.get_server_metadata().extensions
        for seed, (shape_q, shape_kv) in enumerate(SHAPES):
            check(client, service, seed, shape_q, shape_kv)


if __name__ == "__main__":
    main()
