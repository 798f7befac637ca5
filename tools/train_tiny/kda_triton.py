"""GPU kernels of kda.py's two inner loops (Triton). kda.py has their definitions and runs those on a CPU.

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


def products(q, k, total, attend, overlap):
    n, d = q.shape[-2:]
    _products[(q.numel() // (n * d), n // BLOCK)](q, k, total, attend, overlap, n, d, BLOCK, _precision(), num_warps=2)


def products_backward(q, k, total, attend, overlap, grad_q, grad_k, grad_total):
    n, d = q.shape[-2:]
    grid = (q.numel() // (n * d), n // BLOCK)
    _products_backward[grid](q, k, total, attend, overlap, grad_q, grad_k, grad_total, n, d, BLOCK, _precision())


def _columns(batch):
    """Columns of a state in one program, and its warps; these won on an H200."""
    return (64, 8) if batch >= 64 and _precision() == "tf32" else (32, 4)


def states(added, removed, kept, decay, values, states):
    chunks, batch, n, d = added.shape
    width, warps = _columns(batch)
    _states[(batch, d // width)](added, removed, kept, decay, values, states, chunks, batch, n, d, _precision(), width,
                                 num_warps=warps, num_stages=2)


def states_backward(grad_values, grad_states, grad_last, removed, kept, decay, added, onward):
    chunks, batch, n, d = added.shape
    width, warps = _columns(batch)
    _states_backward[(batch, d // width)](grad_values, grad_states, grad_last, removed, kept, decay, added, onward,
                                          chunks, batch, n, d, _precision(), width, num_warps=warps, num_stages=2)
