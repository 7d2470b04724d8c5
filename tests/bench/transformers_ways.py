#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of attention in a transformers model by implementation: a batch of sequences of
different lengths, padded and packed; and generation. Random weights, on the CPU.

    PYTHONPATH=client/python:kernels/python python3 tests/bench/transformers_ways.py

Each number is the best of some runs. Batches are measured in this process, in processor time, which
other processes affect least. With --server ADDRESS it also generates with a server, in wall-clock
time."""

import argparse
import time

import attend
import attend.transformers
import torch
import transformers

CONFIG = dict(vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
              num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=8192)


def make(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, attn_implementation=implementation)
    return transformers.LlamaForCausalLM(config).eval()


def best(function, runs, clock):
    times = []
    for _ in range(runs):
        begin = clock()
        function()
        times.append(clock() - begin)
    return min(times)


def batches(lengths):
    """The same tokens, padded on the right and packed."""
    ids = [torch.randint(0, CONFIG["vocab_size"], (length,)) for length in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return (dict(input_ids=padded, attention_mask=mask.long()),
            dict(input_ids=torch.cat(ids)[None], position_ids=positions))


def step(model, inputs, trains):
    """A forward pass, with `trains` also the gradients of all weights."""
    with torch.set_grad_enabled(trains):
        states = model.model(**inputs, use_cache=False).last_hidden_state
    if trains:
        states.square().mean().backward()


def compare_batches(lengths, implementations, runs):
    padded, packed = batches(lengths)
    share = sum(lengths) / padded["input_ids"].numel()
    print(f"\n{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} "
          f"in all, {share:.0%} of the padded batch; processor milliseconds\n")
    print("| | padded | packed | padded, training step | packed, training step |")
    print("|---|---|---|---|---|")
    for name in implementations:
        model = make(name)
        cells = [1000 * best(lambda: step(model, inputs, trains), runs, time.process_time)
                 for trains in (False, True) for inputs in (padded, packed)]
        print(f"| {name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |", flush=True)


def compare_generation(context, implementations, runs, tokens=16):
    ids = torch.randint(0, CONFIG["vocab_size"], (1, context))
    print(f"\nGeneration after {context} tokens, milliseconds a token\n")
    for name in implementations:
        model = make(name.partition(",")[0])

        def cache():
            return attend.transformers.SessionCache(model.config) if "sessions" in name else \
                transformers.DynamicCache(config=model.config)

        def decode(kept):
            with torch.no_grad():
                for _ in range(tokens):
                    model(ids[:, :1], cache=kept, use_cache=True)

        found = []
        for _ in range(runs):
            kept = cache()
            with torch.no_grad():
                model(ids, cache=kept, use_cache=True, logits_to_keep=1)
            found.append(best(lambda: decode(kept), 1, time.perf_counter))
        print(f"{name}: {1000 * min(found) / tokens:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--server", help="address of an attend server")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    ways = ["eager", "sdpa", "attend"]
    for lengths in ([512] + [32] * 15, [512, 256, 256, 128, 128, 128, 128] + [64] * 9):
        compare_batches(lengths, ways, arguments.runs)
    with attend.connect(arguments.server):
        if arguments.server:
            ways += ["attend-server", "attend-server, sessions"]
        for context in (512, 4096):
            compare_generation(context, ways, arguments.runs)


if __name__ == "__main__":
    main()
