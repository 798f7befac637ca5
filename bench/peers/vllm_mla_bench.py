#!/usr/bin/env python3
"""Triton MLA decode of an installed vLLM, timed as cuda_mla_bench times Perigee's: one layer, shuffled pages of 64 tokens.

    pip install vllm==0.15.1   # before vLLM #33529: 4 splits, keys read twice
    pip install vllm==0.33.0   # after: splits by length, values from the key tile
    python3 bench/peers/vllm_mla_bench.py [substring]     rows whose name holds it

Calls vLLM's decode_attention_fwd with the number of splits that the backend of the same version chooses; its kernel and
the one that joins splits are timed together. A figure is the median of 11 replays of a CUDA graph divided by its calls,
each of which reads other pages, several times the L2 together. Before a row is timed its output is compared with
attention in float32.
"""
import importlib.metadata
import inspect
import sys

import torch
import triton
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from graph_timing import time_us

LATENT, WIDTH, PAGE, SCALE = 512, 576, 64, 192 ** -0.5
POOL_BYTES, MOST_CALLS = 3 << 30, 40  # older versions count elements in 32 bits
AFTER = "is_mla" in inspect.signature(decode_attention_fwd).parameters  # 33529 brought it
ROWS = [(dtype, heads, batch, length) for dtype in ("bf16", "fp8") for heads, batch, length in
        [(8, 1, 80000), (16, 1, 80000), (64, 1, 80000), (128, 1, 80000), (16, 1, 1024), (8, 64, 16384), (64, 64, 16384)]]


def num_splits(length):
    if not AFTER:
        return 4
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return min(triton.next_power_of_2(max(1, length // 512)), 2 * processors)


class Row:
    def __init__(self, dtype, heads, batch, length):
        kind = torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
        pages = POOL_BYTES // (PAGE * WIDTH * kind.itemsize)
        self.pool = torch.empty(pages, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1).to(kind)
        self.q = torch.empty(batch, heads, WIDTH, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)
        self.out = torch.empty(batch, heads, LATENT, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.empty(batch, heads, device="cuda", dtype=torch.bfloat16)
        self.lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.splits = num_splits(length)
        self.parts = torch.empty(batch, heads, self.splits, LATENT + 1, device="cuda", dtype=torch.float32)
        blocks = -(-length // PAGE)
        calls = min(pages // (blocks * batch), MOST_CALLS)
        order = torch.randperm(pages, device="cuda", dtype=torch.int32)
        self.tables = order[:calls * batch * blocks].view(calls, batch, blocks)
        one = torch.ones((), device="cuda")
        self.more = {"is_mla": True, "k_scale": one, "v_scale": one} if AFTER else {}

    def run(self, call):
        decode_attention_fwd(self.q, self.pool, self.pool[..., :LATENT], self.out, self.lse, self.tables[call], self.lengths,
                             self.parts, self.splits, SCALE, PAGE, **self.more)

    def check(self):
        self.run(0)
        length = int(self.lengths[0])
        keys = self.pool[self.tables[0, -1].long()].view(-1, WIDTH)[:length].float()
        weights = (self.q[-1].float() @ keys.T * SCALE).softmax(-1)
        wanted = weights @ keys[:, :LATENT]
        error = ((self.out[-1].float() - wanted).norm() / wanted.norm()).item()
        if not error < 2e-2:
            sys.exit(f"not attention: {error:.1e} off")


@torch.inference_mode()
def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"{torch.cuda.get_device_name()}, vllm {importlib.metadata.version('vllm')}, triton {triton.__version__}, "
          f"{'after' if AFTER else 'before'} #33529", flush=True)
    for dtype, heads, batch, length in ROWS:
        name = f"{dtype} h{heads} B{batch} S{length}"
        if wanted not in name or (dtype == "fp8" and not AFTER):  # an fp8 cache came with later versions
            continue
        row = Row(dtype, heads, batch, length)
        row.check()
        us = time_us([lambda call=call: row.run(call) for call in range(len(row.tables))])
        print(f"{name:36} {us:9.1f} us   {row.splits} splits", flush=True)


if __name__ == "__main__":
    main()
