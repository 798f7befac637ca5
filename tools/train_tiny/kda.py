"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): chunk form, token recurrence and the layer (PyTorch).

A head's state S [key, value] starts at zero; per token, with log decays g <= 0 per key channel,
    S <- diag(e^g) S;  S <- S + k (beta (v - k S));  o = q S.
The chunk form computes 64 tokens at once. It only ever forms e^(G_i - G_j) with i >= j, G being the running sum of g:
every exponent is <= 0, so no decay is too strong. Sequences start at multiples of 64.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from layers import linear, matrix, ones, output_gain

CHUNK = 64
# Up to these sizes the recursions below end in sums that are exact in f32 and fuse into one kernel.
PRODUCT_LEAF, INVERSE_LEAF = 16, 8


def halves(x):
    """[..., n, d] → its rows' first and second half [..., n/2, d]."""
    return x.unflatten(-2, (2, -1)).unbind(-3)


def corner_join(top_left, bottom_left, bottom_right):
    top = torch.cat((top_left, torch.zeros_like(top_left)), -1)
    return torch.cat((top, torch.cat((bottom_left, bottom_right), -1)), -2)


def decayed_products(a, k, total):
    """P_ij = sum over d of a_i k_j e^(G_i - G_j) for j <= i, else 0: [..., n, d] each → [..., n, n].

    Rows of the second half meet columns of the first at the decay of the first half's last row, which splits the
    exponent into two that are <= 0, and the sum becomes a matrix product.
    """
    n = k.shape[-2]
    if n <= PRODUCT_LEAF:
        gap = total.unsqueeze(-2) - total.unsqueeze(-3)
        lower = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()
        decay = gap.masked_fill(~lower[..., None], float("-inf")).exp()
        return (a.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1)
    diagonal = decayed_products(*(x.unflatten(-2, (2, -1)) for x in (a, k, total)))
    (_, low_a), (high_k, _), (high, low) = halves(a), halves(k), halves(total)
    middle = high[..., -1:, :]
    corner = (low_a * (low - middle).exp()) @ (high_k * (middle - high).exp()).transpose(-1, -2)
    return corner_join(diagonal[..., 0, :, :], corner, diagonal[..., 1, :, :])


def small_product(a, b):
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def unit_lower_inverse(lower):
    """(I + L)^-1 for strictly lower triangular L [..., n, n]."""
    n = lower.shape[-1]
    if n <= INVERSE_LEAF:
        inverse, power = torch.eye(n, dtype=lower.dtype, device=lower.device) - lower, lower
        for _ in range(1, (n - 1).bit_length()):
            power = small_product(power, power)
            inverse = inverse + small_product(inverse, power)
        return inverse
    half = n // 2
    corner = lower[..., half:, :half]
    first, second = unit_lower_inverse(torch.stack((lower[..., :half, :half], lower[..., half:, half:]), -3)).unbind(-3)
    return corner_join(first, -(second @ corner @ first), second)


def chunk_terms(q, k, v, g, beta):
    """What each chunk does by itself: [..., 64, d] and beta [..., 64] → output for a zero start state, queries that
    read the start state, and the state's transition [..., key, key] and addition [..., key, value]."""
    total = g.cumsum(-2)
    to_end = (total[..., -1:, :] - total).exp()
    attend, overlap = decayed_products(torch.stack((q, k)), k, total).unbind(0)
    inverse = unit_lower_inverse(beta[..., None] * overlap.tril(-1)) * beta[..., None, :]
    new_values, removed = inverse @ v, inverse @ (k * total.exp())
    kept = (k * to_end).transpose(-1, -2)
    transition = torch.diag_embed(total[..., -1, :].exp()) - kept @ removed
    return attend @ new_values, q * total.exp() - attend @ removed, transition, kept @ new_values


def start_states(transition, addition):
    """State before each chunk of a row: [rows, chunks, ..., key, key or value] → the same, by pairwise combination."""
    count = addition.shape[1]
    if count == 1:
        return torch.zeros_like(addition)
    if count % 2:
        transition, addition = (F.pad(x, [0, 0] * (x.dim() - 2) + [0, 1]) for x in (transition, addition))
    (a0, a1), (b0, b1) = ((x[:, 0::2], x[:, 1::2]) for x in (transition, addition))
    even = start_states(a1 @ a0, a1 @ b0 + b1)
    return torch.stack((even, a0 @ even + b0), 2).flatten(1, 2)[:, :count]


def recurrent_step(state, q, k, v, g, beta):
    """One token: state [..., key, value] → (new state, output [..., value])."""
    state = state * g.exp()[..., None]
    delta = beta[..., None] * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k[..., None] * delta[..., None, :]
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def convolve(x, weight, positions):
    """Causal depthwise convolution and SiLU of flat rows [T, channels]; the last tap meets the current token."""
    taps = weight.shape[-1]
    weight = weight.to(x.dtype).float()
    total = x.float() * weight[:, -1]
    for back in range(1, taps):
        earlier = F.pad(x, (0, 0, back, 0))[:x.shape[0]] * (positions >= back)[:, None]
        total = total + earlier.float() * weight[:, taps - 1 - back]
    return F.silu(total).to(x.dtype)


class KdaAttention(nn.Module):
    """q, k and v share one matrix and one convolution; on the hub they are three."""

    def __init__(self, config):
        super().__init__()
        kda, h = config["linear_attn_config"], config["hidden_size"]
        self.heads, self.dim, self.taps = kda["num_heads"], kda["head_dim"], kda["short_conv_kernel_size"]
        self.eps, width = config["rms_norm_eps"], self.heads * self.dim
        self.qkv, self.conv = matrix(3 * width, h), matrix(3 * width, self.taps)
        self.f_a, self.f_b, self.b = matrix(self.dim, h), matrix(width, self.dim, gain=0.5), matrix(self.heads, h)
        self.g_a, self.g_b = matrix(self.dim, h), matrix(width, self.dim)
        self.a_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        # softplus(dt_bias) spread evenly in its logarithm from 0.001 to 0.1.
        step = torch.empty(width).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.o_norm, self.o = ones(self.dim), matrix(h, width, gain=output_gain(config))

    def split_heads(self, mixed):
        """Convolved [..., 3 width] → q, k (normalised), v [..., heads, dim], f32."""
        q, k, v = mixed.float().unflatten(-1, (3, self.heads, self.dim)).unbind(-3)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return q * self.dim ** -0.5, k, v

    def gates(self, y):
        """Log decay [..., heads, dim] and beta [..., heads], f32; output gate [..., width]."""
        a = linear(linear(y, self.f_a), self.f_b).float() + self.dt_bias
        decay = -self.a_log.exp()[:, None] * F.softplus(a).unflatten(-1, (self.heads, self.dim))
        return decay, torch.sigmoid(linear(y, self.b).float()), linear(linear(y, self.g_a), self.g_b)

    def terms(self, mixed, decay, beta):
        """chunk_terms of flat tokens [T, ...] → [T/64, heads, ...]."""
        inputs = [x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (*self.split_heads(mixed), decay)]
        return chunk_terms(*inputs, beta.unflatten(0, (-1, CHUNK)).transpose(1, 2))

    def project(self, y, positions):
        """Normed input [T, H] of rows whose tokens stand at `positions` → the parts of mix."""
        decay, beta, z = self.gates(y)
        return (*self.terms(convolve(linear(y, self.qkv), self.conv, positions), decay, beta), z)

    def mix(self, parts, rows):
        """→ (attention's output [T, heads, dim], output gate)."""
        local, queries, transition, addition, z = parts
        states = start_states(*(x.unflatten(0, (rows, -1)) for x in (transition, addition))).flatten(0, 1)
        return (local + queries @ states).transpose(1, 2).flatten(0, 1).to(z.dtype), z

    def finish(self, mixed):
        out, z = mixed
        out = out.float()
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps)
        normed = normed * self.o_norm.to(z.dtype).float()
        return linear((normed.flatten(-2) * torch.sigmoid(z.float())).to(z.dtype), self.o)

    def prefill(self, y, lengths):
        """Reference: y [rows, length, H], rows valid up to lengths → output, (last raw projections, state)."""
        rows, length = y.shape[:2]
        y = F.pad(y, (0, 0, 0, -length % CHUNK))
        positions = torch.arange(y.shape[1], device=y.device).repeat(rows)
        # Beyond its length a row neither decays its state nor writes to it.
        valid = (positions.unflatten(0, (rows, -1)) < lengths[:, None]).flatten()
        raw, (decay, beta, z) = linear(y, self.qkv), self.gates(y.flatten(0, 1))
        parts = (*self.terms(convolve(raw.flatten(0, 1), self.conv, positions),
                             decay * valid[:, None, None], beta * valid[:, None]), z)
        out = self.finish(self.mix(parts, rows)).unflatten(0, (rows, -1))[:, :length]
        transition, addition = (x.unflatten(0, (rows, -1)) for x in parts[2:4])
        state = transition[:, -1] @ start_states(transition, addition)[:, -1] + addition[:, -1]
        at = lengths[:, None] + torch.arange(self.taps - 1, device=y.device)
        tail = F.pad(raw, (0, 0, self.taps - 1, 0))[torch.arange(rows, device=y.device)[:, None], at]
        return out, (tail, state)

    def step(self, y, cache):
        """Reference: one token a row, y [rows, H]; → output, new cache."""
        tail, state = cache
        window = torch.cat((tail, linear(y, self.qkv)[:, None]), 1)
        mixed = F.silu((window.float() * self.conv.to(y.dtype).float().T).sum(1)).to(y.dtype)
        decay, beta, z = self.gates(y)
        state, out = recurrent_step(state, *self.split_heads(mixed), decay, beta)
        return self.finish((out.to(y.dtype), z)), (window[:, 1:], state)

    # Hub name → attribute, for those that are stored as they are.
    STORED = {"f_a_proj.weight": "f_a", "f_b_proj.weight": "f_b", "b_proj.weight": "b", "g_a_proj.weight": "g_a",
              "g_b_proj.weight": "g_b", "o_norm.weight": "o_norm", "o_proj.weight": "o", "dt_bias": "dt_bias"}

    def to_hub(self):
        """{hub name: tensor}: bf16, but A_log and dt_bias f32."""
        out = {name: getattr(self, mine) for name, mine in self.STORED.items()}
        for at, letter in enumerate("qkv"):
            out[letter + "_proj.weight"] = self.qkv.chunk(3)[at]
            out[letter + "_conv1d.weight"] = self.conv.chunk(3)[at][:, None]
        out["A_log"] = self.a_log.view(1, 1, -1, 1)
        return {name: x.float() if name in ("A_log", "dt_bias") else x.bfloat16() for name, x in out.items()}

    @torch.no_grad()
    def from_hub(self, get):
        """Takes the stored values; get(hub name) → tensor."""
        for name, mine in self.STORED.items():
            setattr(self, mine, nn.Parameter(get(name)))
        self.qkv = nn.Parameter(torch.cat([get(letter + "_proj.weight") for letter in "qkv"]))
        self.conv = nn.Parameter(torch.cat([get(letter + "_conv1d.weight") for letter in "qkv"])[:, 0])
        self.a_log = nn.Parameter(get("A_log").flatten())
        return self
