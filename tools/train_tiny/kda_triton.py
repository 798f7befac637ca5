"""GPU kernels of kda.py's two inner loops, decayed_products and chunk_states, with their gradients (Triton).

All tensors are f32 and contiguous; one program handles rows of one chunk and head, or columns of one sequence's and
head's state. Matrix products use TF32 where torch.set_float32_matmul_precision allows it.
"""

import torch
import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def _load(base, row, ROWS: tl.constexpr, D: tl.constexpr):
    return tl.load(base + (row + tl.arange(0, ROWS))[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _products(q, k, total, attend, overlap, N: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
              P: tl.constexpr):
    """Rows first .. first + B of both products of one chunk; what lies above the diagonal block stays as it is."""
    chunk, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * B
    q, k, total = q + chunk * N * D, k + chunk * N * D, total + chunk * N * D
    attend, overlap = attend + chunk * N * N, overlap + chunk * N * N
    rows, d = tl.arange(0, B), tl.arange(0, D)
    q_i, k_i, g_i = _load(q, first, B, D), _load(k, first, B, D), _load(total, first, B, D)
    middle = tl.load(total + tl.maximum(first - 1, 0) * D + d)[None, :]
    decay = tl.exp(tl.minimum(g_i - middle, 0.0))
    for column in range(0, first, B):
        k_j = tl.trans(_load(k, column, B, D) * tl.exp(middle - _load(total, column, B, D)))
        at = (first + rows)[:, None] * N + column + rows[None, :]
        tl.store(attend + at, tl.dot(q_i * decay, k_j, input_precision=P))
        tl.store(overlap + at, tl.dot(k_i * decay, k_j, input_precision=P))
    for column in range(first, first + B):
        k_j, g_j = tl.load(k + column * D + d)[None, :], tl.load(total + column * D + d)[None, :]
        weighted = k_j * tl.exp(tl.minimum(g_i - g_j, 0.0))
        at, lower = (first + rows) * N + column, first + rows >= column
        tl.store(attend + at, tl.where(lower, tl.sum(q_i * weighted, 1), 0.0))
        tl.store(overlap + at, tl.where(lower, tl.sum(k_i * weighted, 1), 0.0))


@triton.jit
def _products_backward(q, k, total, attend, overlap, grad_q, grad_k, grad_total,
                       N: tl.constexpr, D: tl.constexpr, B: tl.constexpr, P: tl.constexpr):
    """attend and overlap are the gradients of the products."""
    chunk, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * B
    q, k, total = q + chunk * N * D, k + chunk * N * D, total + chunk * N * D
    attend, overlap = attend + chunk * N * N, overlap + chunk * N * N
    rows, d = tl.arange(0, B), tl.arange(0, D)
    q_i, k_i, g_i = _load(q, first, B, D), _load(k, first, B, D), _load(total, first, B, D)
    # As rows: against columns up to the diagonal.
    row_q, row_k = tl.zeros([B, D], tl.float32), tl.zeros([B, D], tl.float32)
    middle = tl.load(total + tl.maximum(first - 1, 0) * D + d)[None, :]
    for column in range(0, first, B):
        k_j = _load(k, column, B, D) * tl.exp(middle - _load(total, column, B, D))
        at = (first + rows)[:, None] * N + column + rows[None, :]
        row_q += tl.dot(tl.load(attend + at), k_j, input_precision=P)
        row_k += tl.dot(tl.load(overlap + at), k_j, input_precision=P)
    decay = tl.exp(tl.minimum(g_i - middle, 0.0))
    row_q, row_k = row_q * decay, row_k * decay
    # As columns: against rows from the diagonal on.
    column_k = tl.zeros([B, D], tl.float32)
    middle = tl.load(total + (first + B - 1) * D + d)[None, :]
    for row in range(first + B, N, B):
        decay = tl.exp(_load(total, row, B, D) - middle)
        at = (row + rows)[None, :] * N + first + rows[:, None]
        column_k += tl.dot(tl.load(attend + at), _load(q, row, B, D) * decay, input_precision=P)
        column_k += tl.dot(tl.load(overlap + at), _load(k, row, B, D) * decay, input_precision=P)
    column_k = column_k * tl.exp(middle - g_i)
    for at in range(first, first + B):
        q_j, k_j = tl.load(q + at * D + d)[None, :], tl.load(k + at * D + d)[None, :]
        g_j = tl.load(total + at * D + d)[None, :]
        weighted, lower = k_j * tl.exp(tl.minimum(g_i - g_j, 0.0)), first + rows >= at
        row_q += tl.where(lower, tl.load(attend + (first + rows) * N + at), 0.0)[:, None] * weighted
        row_k += tl.where(lower, tl.load(overlap + (first + rows) * N + at), 0.0)[:, None] * weighted
        decay, upper = tl.exp(tl.minimum(g_j - g_i, 0.0)), first + rows <= at
        column_k += tl.where(upper, tl.load(attend + at * N + first + rows), 0.0)[:, None] * (q_j * decay)
        column_k += tl.where(upper, tl.load(overlap + at * N + first + rows), 0.0)[:, None] * (k_j * decay)
    out = chunk * N * D + (first + rows)[:, None] * D + d[None, :]
    tl.store(grad_q + out, row_q)
    tl.store(grad_k + out, row_k + column_k)
    tl.store(grad_total + out, q_i * row_q + k_i * (row_k - column_k))


@triton.jit
def _states(added, removed, kept, decay, values, states, chunks, batch, N: tl.constexpr, D: tl.constexpr,
            P: tl.constexpr, V: tl.constexpr):
    """Columns first .. first + V of one state through all its chunks."""
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * V
    n, d, v = tl.arange(0, N), tl.arange(0, D), first + tl.arange(0, V)
    state = tl.zeros([D, V], tl.float32)
    for c in range(chunks):
        at = c * batch + sequence
        tl.store(states + at * D * D + d[:, None] * D + v[None, :], state)
        value = tl.load(added + at * N * D + n[:, None] * D + v[None, :])
        value -= tl.dot(_load(removed + at * N * D, 0, N, D), state, input_precision=P)
        tl.store(values + at * N * D + n[:, None] * D + v[None, :], value)
        state = state * tl.load(decay + at * D + d)[:, None]
        state += tl.dot(tl.trans(_load(kept + at * N * D, 0, N, D)), value, input_precision=P)
    tl.store(states + (chunks * batch + sequence) * D * D + d[:, None] * D + v[None, :], state)


@triton.jit
def _states_backward(grad_values, grad_states, grad_last, removed, kept, decay, added, onward, chunks, batch,
                     N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, V: tl.constexpr):
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * V
    n, d, v = tl.arange(0, N), tl.arange(0, D), first + tl.arange(0, V)
    grad = tl.load(grad_last + sequence * D * D + d[:, None] * D + v[None, :])
    for back in range(chunks):
        at = (chunks - 1 - back) * batch + sequence
        tl.store(onward + at * D * D + d[:, None] * D + v[None, :], grad)
        value = tl.load(grad_values + at * N * D + n[:, None] * D + v[None, :])
        value += tl.dot(_load(kept + at * N * D, 0, N, D), grad, input_precision=P)
        tl.store(added + at * N * D + n[:, None] * D + v[None, :], value)
        grad = grad * tl.load(decay + at * D + d)[:, None]
        grad += tl.load(grad_states + at * D * D + d[:, None] * D + v[None, :])
        grad -= tl.dot(tl.trans(_load(removed + at * N * D, 0, N, D)), value, input_precision=P)


def _precision():
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _columns(batch):
    """Columns of a state in one program, and its warps; these won on an H200."""
    return (64, 8) if batch >= 64 and _precision() == "tf32" else (32, 4)


@torch.library.custom_op("tiny::decayed_products", mutates_args=())
def decayed_products(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kda.decayed_products of q with k and of k with k."""
    n, d = q.shape[-2:]
    out = [q.new_zeros(*q.shape[:-1], n) for _ in range(2)]
    _products[(q.numel() // (n * d), n // BLOCK)](q.contiguous(), k.contiguous(), total.contiguous(), *out,
                                                  n, d, BLOCK, _precision(), num_warps=2)
    return tuple(out)


@decayed_products.register_fake
def _(q, k, total):
    return tuple(q.new_empty(*q.shape[:-1], q.shape[-2]) for _ in range(2))


@torch.library.custom_op("tiny::decayed_products_backward", mutates_args=())
def decayed_products_backward(grad_q: torch.Tensor, grad_k: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                              total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and total from those of the two products."""
    n, d = q.shape[-2:]
    inputs = [x.contiguous() for x in (q, k, total, grad_q, grad_k)]
    out = [torch.empty_like(inputs[0]) for _ in range(3)]
    _products_backward[(q.numel() // (n * d), n // BLOCK)](*inputs, *out, n, d, BLOCK, _precision())
    return tuple(out)


@decayed_products_backward.register_fake
def _(grad_q, grad_k, q, k, total):
    return tuple(torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3))


decayed_products.register_autograd(
    lambda ctx, grad_q, grad_k: decayed_products_backward(grad_q, grad_k, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class ChunkStates(torch.autograd.Function):
    """kda.chunk_states."""

    @staticmethod
    def forward(ctx, added, removed, kept, decay):
        added, removed, kept, decay = (x.contiguous() for x in (added, removed, kept, decay))
        chunks, batch, n, d = added.shape
        values, states = torch.empty_like(added), added.new_empty(chunks + 1, batch, d, d)
        width, warps = _columns(batch)
        _states[(batch, d // width)](added, removed, kept, decay, values, states, chunks, batch, n, d, _precision(),
                                     width, num_warps=warps, num_stages=2)
        ctx.save_for_backward(removed, kept, decay, values, states)
        return values, states[:-1], states[-1]

    @staticmethod
    def backward(ctx, grad_values, grad_states, grad_last):
        removed, kept, decay, values, states = ctx.saved_tensors
        grads = [x.contiguous() for x in (grad_values, grad_states, grad_last)]
        chunks, batch, n, d = values.shape
        # onward[c] is the gradient of the state after chunk c.
        added, onward = torch.empty_like(values), torch.empty_like(states[1:])
        width, warps = _columns(batch)
        _states_backward[(batch, d // width)](*grads, removed, kept, decay, added, onward, chunks, batch, n, d,
                                              _precision(), width, num_warps=warps, num_stages=2)
        grad_removed = -(added @ states[:-1].transpose(-1, -2))
        grad_kept = values @ onward.transpose(-1, -2)
        return added, grad_removed, grad_kept, (states[:-1] * onward).sum(-1, keepdim=True)
