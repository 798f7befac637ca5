"""Checks the chunk form of KDA against the token recurrence, and its gradients, in float64; where there is a GPU, its
kernels too.

    python3 check_kda.py
"""

import torch

import kda


def draw(generator, rows, length, heads, dim, strength, correlated):
    """q, k, v, g, beta [rows, length, heads, ...]; strength scales the log decays."""
    shape = (rows, length, heads, dim)
    q, k, v, spread = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    if correlated:
        k = k[:, :1] + 1e-3 * k
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = torch.rand(shape[:-1], generator=generator, dtype=torch.float64)
    return q * dim ** -0.5, k, v, -strength * (2 * spread).exp(), beta


def recurrence(q, k, v, g, beta):
    """→ outputs [rows, length, heads, dim] and the last state."""
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=k.dtype)
    out = []
    for t in range(k.shape[1]):
        state, o = kda.recurrent_step(state, *(x[:, t] for x in (q, k, v, g, beta)))
        out.append(o)
    return torch.stack(out, 1), state


def chunked(*inputs):
    """The same in chunks, as KdaAttention runs them."""
    rows = inputs[0].shape[0]
    flat = [kda.by_chunks(x.flatten(0, 1), rows).unflatten(0, (-1, kda.CHUNK)).transpose(1, 2) for x in inputs]
    out, state = kda.run_chunks(kda.chunk_terms(*flat), rows)
    return kda.by_rows(out, rows).unflatten(0, (rows, -1)), state


def relative(a, b):
    assert torch.isfinite(a).all() and torch.isfinite(b).all()
    return ((a - b).norm() / b.norm()).item()


def differences(inputs, dtype):
    """Relative errors of chunked in `dtype`: (output, state, gradients of all inputs)."""
    leaves = [[x.detach().clone().to(t).requires_grad_() for x in inputs] for t in (torch.float64, dtype)]
    results = [recurrence(*leaves[0]), chunked(*leaves[1])]
    for out, state in results:
        (out.square().sum() + state.sin().sum()).backward()
    forward = [relative(mine, exact) for exact, mine in zip(*results)]
    return (*forward, max(relative(mine.grad, exact.grad) for exact, mine in zip(*leaves)))


def check_gpu(inputs):
    """The GPU kernels, in f32 throughout, against the definitions."""
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().float().to(device).requires_grad_() for x in inputs]
        out, state = chunked(*leaves)
        (out.square().sum() + state.sin().sum()).backward()
        results.append([x.detach().cpu() for x in (out, state, *(leaf.grad for leaf in leaves))])
    worst = max(relative(mine, exact) for exact, mine in zip(*results))
    print("    GPU against CPU, f32: %.1e" % worst)
    assert worst < 1e-2


def main():
    generator = torch.Generator().manual_seed(1)
    print("strength correlated chunks | f64: output, state, gradients | f32")
    for strength in (0.0, 1e-3, 0.1, 3.0, 100.0):
        for correlated in (False, True):
            for chunks in (1, 3):
                inputs = draw(generator, 2, chunks * kda.CHUNK, 2, 16, strength, correlated)
                exact, rounded = differences(inputs, torch.float64), differences(inputs, torch.float32)
                print("%8g %10s %6d | %.1e %.1e %.1e | %.1e %.1e %.1e"
                      % (strength, correlated, chunks, *exact, *rounded), flush=True)
                # Running sums of strong decays are large, and their differences lose digits in f32.
                assert max(exact) < 1e-10 and max(rounded[:2]) < (1e-5 if strength < 1 else 1e-3)
        if torch.cuda.is_available():
            check_gpu(draw(generator, 2, 3 * kda.CHUNK, 2, 128, strength, False))
    print("ok")


if __name__ == "__main__":
    main()
