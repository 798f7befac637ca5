#!/usr/bin/env python3
"""Kimi Delta Attention of flash-linear-attention (fla), timed as cuda_kda_bench times Perigee's: one layer of 32 heads,
everything between the projections (short convolutions, gates, recurrence, output norm and gate, final states).

    python3 bench/peers/fla_kda_bench.py [substring]     rows whose name holds it

Needs torch, triton and fla (pip install flash-linear-attention); Triton compiles and tunes for minutes. The calls are
those of fla's KimiDeltaAttention layer, unbounded gate, activations bf16. A figure is the median of 11 replays of a CUDA
graph divided by its calls; each call has inputs and states of its own, several times the L2 together. At the end outputs
and states of a short prefill, and of a step after it, are compared with the recurrence in float64.
"""
import sys

import torch
import triton
import fla
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.ops.kda import chunk_kda, fused_recurrent_kda

from graph_timing import time_us

DIM, TAPS = 128, 4


def uniform(*shape, low=-2.0, high=2.0, dtype=torch.bfloat16):
    return torch.empty(*shape, device="cuda", dtype=torch.float32).uniform_(low, high).to(dtype)


class Weights:
    def __init__(self, heads):
        self.heads, width = heads, heads * DIM
        self.conv = [ShortConvolution(width, TAPS, activation="silu", device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        for conv in self.conv:
            conv.weight.data.copy_(uniform(width, 1, TAPS, low=-0.6, high=0.6))
        self.a_log = uniform(heads, low=1, high=16, dtype=torch.float32).log()
        self.dt_bias = uniform(width, low=-7, high=-2, dtype=torch.float32)
        self.norm = FusedRMSNormGated(DIM, activation="sigmoid", eps=1e-5, device="cuda", dtype=torch.bfloat16)
        self.norm.weight.data.copy_(uniform(DIM, low=0.5, high=1.5))


class Rows:
    """What the projections give: of `tokens` new tokens of each of `batch` sequences."""

    def __init__(self, batch, tokens, heads):
        self.qkv = [uniform(batch, tokens, heads * DIM) for _ in "qkv"]
        self.a, self.z = uniform(batch, tokens, heads, DIM), uniform(batch, tokens, heads, DIM)
        self.b = uniform(batch, tokens, heads)


class State:
    def __init__(self, batch, heads):
        self.tails = [uniform(batch, heads * DIM, TAPS) for _ in "qkv"]
        self.memory = uniform(batch, heads, DIM, DIM, low=-0.1, high=0.1, dtype=torch.float32)


def run(recurrence, w, rows, state=None):
    """Outputs [batch, tokens, heads, 128] and the state after them; convolutions' tails change in place in a step."""
    tails = state.tails if state else [None] * 3
    qkv, out = [], State.__new__(State)
    out.tails = []
    for conv, x, tail in zip(w.conv, rows.qkv, tails):
        y, tail = conv(x=x, cache=tail, output_final_state=True)
        qkv.append(y.unflatten(-1, (w.heads, DIM)))
        out.tails.append(tail)
    o, out.memory = recurrence(
        q=qkv[0], k=qkv[1], v=qkv[2], g=rows.a, beta=rows.b, A_log=w.a_log, dt_bias=w.dt_bias,
        initial_state=state.memory if state else None, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True)
    return w.norm(o, rows.z), out


def reference(w, parts):
    """run() over the rows of `parts`, one after the other, by the recurrence in float64."""
    joined = [torch.cat([p.qkv[i] for p in parts], 1).double() for i in range(3)]
    a, z, b = (torch.cat([getattr(p, name) for p in parts], 1).double() for name in "azb")
    q, k, v = (
        torch.nn.functional.silu(
            torch.nn.functional.conv1d(x.mT, conv.weight.double(), padding=TAPS - 1, groups=x.shape[-1])[..., :x.shape[1]].mT
        ).unflatten(-1, (w.heads, DIM)) for x, conv in zip(joined, w.conv))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = (-w.a_log.double().exp()[:, None] * torch.nn.functional.softplus(a + w.dt_bias.double().view(w.heads, DIM))).exp()
    beta = b.sigmoid()[..., None, None]
    memory = torch.zeros(a.shape[0], w.heads, DIM, DIM, device="cuda", dtype=torch.float64)  # [key, value]
    out = []
    for t in range(a.shape[1]):
        memory = memory * decay[:, t, :, :, None]
        correction = v[:, t] - (k[:, t, :, :, None] * memory).sum(-2)
        memory = memory + beta[:, t] * k[:, t, :, :, None] * correction[:, :, None]
        out.append((q[:, t, :, :, None] * memory).sum(-2) * DIM ** -0.5)
    o = torch.stack(out, 1)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.norm.weight.double() * z.sigmoid()
    return o, memory.mT


def check():
    w, prompt, step = Weights(2), Rows(2, 130, 2), Rows(2, 1, 2)
    first, state = run(chunk_kda, w, prompt)
    second, state = run(fused_recurrent_kda, w, step, state)
    wanted, memory = reference(w, [prompt, step])
    for name, got, want in ("outputs", torch.cat([first, second], 1), wanted), ("state", state.memory, memory):
        error = ((got.double() - want).norm() / want.norm()).item()
        print(f"{name}: {error:.1e} off float64")
        if not error < 2e-2:
            sys.exit("not the same function")


def prefill(w, batch, tokens):
    inputs = [Rows(batch, tokens, w.heads) for _ in range(2)]
    whole = time_us([lambda rows=rows: run(chunk_kda, w, rows) for rows in inputs])
    shaped = [[x.unflatten(-1, (w.heads, DIM)) for x in rows.qkv] for rows in inputs]
    alone = time_us([
        lambda qkv=qkv, rows=rows: chunk_kda(
            q=qkv[0], k=qkv[1], v=qkv[2], g=rows.a, beta=rows.b, A_log=w.a_log, dt_bias=w.dt_bias, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True)
        for qkv, rows in zip(shaped, inputs)])
    return whole, alone


def decode(w, batch):
    layers = min(max(640 // batch, 4), 80)
    rows, states = Rows(batch, 1, w.heads), [State(batch, w.heads) for _ in range(layers)]
    return time_us([lambda state=state: run(fused_recurrent_kda, w, rows, state) for state in states])


@torch.inference_mode()
def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"{torch.cuda.get_device_name()}, fla {fla.__version__}, torch {torch.__version__}, triton {triton.__version__}")
    w = Weights(32)
    for batch, tokens in (1, 8192), (8, 1024), (1, 2048), (1, 512):  # the first is what fla's kernels are tuned on
        name = f"prefill {batch} x {tokens}"
        if wanted in name:
            whole, alone = prefill(w, batch, tokens)
            print(f"{name:36} {whole:9.1f} us   (chunk_kda alone {alone:.1f})", flush=True)
    for batch in (1, 16, 64, 256):
        name = f"step B{batch}"
        if wanted in name:
            print(f"{name:36} {decode(w, batch):9.1f} us", flush=True)
    check()


if __name__ == "__main__":
    main()
