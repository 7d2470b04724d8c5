#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A straightforward implementation of Attend in Python, as a rival in bench_service: grpcio,
Protobuf messages, a thread pool, PyTorch's scaled_dot_product_attention.

    python_server.py --descriptors FILE [--device cuda:0] [--workers 16]

FILE is a FileDescriptorSet with attend/v1/attention.proto, from bench_service or from
`protoc --descriptor_set_out`; it gives the same classes as generated code. The first line of output
is "ready ADDRESS", or "cannot REASON" if a module or the device is missing; the server ends at the
end of its input.
"""

import argparse
import concurrent.futures
import sys

METHOD = "Attend"
BHLD = 1
SERVICE = "attend.v1.AttentionService"
FIELDS = {"request_id", "q", "k", "v", "layout", "scale", "raw"}  # supported fields of a request
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def message_classes(path):
    """AttendRequest and AttendResponse."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    pool = descriptor_pool.DescriptorPool()
    with open(path, "rb") as file:
        for proto in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
            pool.Add(proto)
    names = ("attend.v1.AttendRequest", "attend.v1.AttendResponse")
    found = [pool.FindMessageTypeByName(name) for name in names]
    if hasattr(message_factory, "GetMessageClass"):  # from Protobuf 4.22 on
        return [message_factory.GetMessageClass(each) for each in found]
    factory = message_factory.MessageFactory(pool)
    return [factory.GetPrototype(each) for each in found]


class Attention:
    """The handler. gRPC calls it on the pool's threads."""

    def __init__(self, torch, response_class, device):
        self.torch, self.response_class, self.device = torch, response_class, device
        self.dtypes = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32}

    def tensor(self, declared, data):
        # Copies, as PyTorch warns about read-only memory.
        flat = self.torch.frombuffer(bytearray(data), dtype=self.dtypes[declared.dtype])
        return flat.reshape(tuple(declared.shape)).to(self.device)

    def attend(self, request, context):
        import grpc
        unknown = [field.name for field, _ in request.ListFields() if field.name not in FIELDS]
        if request.layout not in (0, BHLD):
            unknown.append("layout")
        if unknown:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{unknown[0]} is not supported here")
        q, k, v = (self.tensor(declared, data) for declared, data in
                   zip((request.q, request.k, request.v), request.raw))
        if q.shape[1] != k.shape[1]:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "k has fewer heads than q")
        scale = request.scale if request.HasField("scale") else None
        with self.torch.inference_mode():
            o = self.torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        response = self.response_class(request_id=request.request_id)
        response.o.dtype = request.q.dtype
        response.o.shape.extend(o.shape)
        # As bytes, since NumPy has no bfloat16.
        response.raw.append(o.contiguous().cpu().view(self.torch.uint8).numpy().tobytes())
        return response


def serve(options, grpc, torch, request_class, response_class):
    handler = Attention(torch, response_class, torch.device(options.device))
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=options.workers)
    server = grpc.server(pool, options=UNLIMITED)
    methods = {METHOD: grpc.unary_unary_rpc_method_handler(
        handler.attend, request_deserializer=request_class.FromString,
        response_serializer=response_class.SerializeToString)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"ready 127.0.0.1:{port}", flush=True)
    sys.stdin.buffer.read()
    server.stop(None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--descriptors", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=16)
    options = parser.parse_args()
    try:
        import grpc
        import torch
        request_class, response_class = message_classes(options.descriptors)
    except ImportError as missing:
        print(f"cannot Python: {missing}", flush=True)
        return 1
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("cannot PyTorch sees no GPU", flush=True)
        return 1
    serve(options, grpc, torch, request_class, response_class)
    return 0


if __name__ == "__main__":
    sys.exit(main())
