"""The tiny Kimi-K2 and Kimi-Linear networks for training (PyTorch).

Master weights are f32; the forward pass uses them rounded to bf16, and routed experts of tiny-k2 rounded to INT4. All
experts are computed and masked by the routing weights: at this size that is faster than gathering tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import configs
import quant
from kda import KdaAttention
from layers import linear, matrix, ones, output_gain, rms_norm, swiglu


def yarn_frequencies(config):
    """Inverse frequencies of the rotary pairs, f64; NoPE is the rotation by zero."""
    scaling, dim = config["rope_scaling"], config["qk_rope_head_dim"]
    if config.get("mla_use_nope"):
        return torch.zeros(dim // 2, dtype=torch.float64)
    base, context = config["rope_theta"], scaling["original_max_position_embeddings"]

    def correction(rotations):
        return dim * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(correction(scaling["beta_fast"])), 0)
    high = min(math.ceil(correction(scaling["beta_slow"])), dim - 1)
    at = torch.arange(dim // 2, dtype=torch.float64)
    plain = base ** (-2 * at / dim)
    ramp = ((at - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def softmax_scale(config):
    scaling = config["rope_scaling"]
    m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1 if scaling else 1.0
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * m * m


def rope_tables(config):
    """cos and sin [max positions, 32], f32; the K2 mscale rule leaves them unscaled."""
    positions = torch.arange(config["max_position_embeddings"], dtype=torch.float64)
    angles = positions[:, None] * yarn_frequencies(config)[None, :]
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    """Interleaved pairs (x[2i], x[2i+1]); cos and sin broadcast over [..., 32]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def route(x, gate, bias, config):
    """f32 weights [tokens, experts], zero for experts that were not chosen."""
    scores = torch.sigmoid(F.linear(x.float(), gate.to(torch.bfloat16).float()))
    chosen = torch.topk(scores + bias, config["num_experts_per_tok"], dim=-1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    weights = scores * mask
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config["routed_scaling_factor"], mask


# Heads of every MLA layer that the guided training of retrieval teaches where to look.
GUIDED_HEADS = 2


class MlaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        c, h, heads, q_rank = config, config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
        dn, dr, dv, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        self.config, self.scale = config, softmax_scale(config)
        if q_rank:
            self.q_a, self.q_a_norm = matrix(q_rank, h), ones(q_rank)
        self.q_b = matrix(heads * (dn + dr), q_rank or h)
        self.kv_a, self.kv_a_norm = matrix(rank + dr, h), ones(rank)
        self.kv_b = matrix(heads * (dn + dv), rank)
        self.o = matrix(h, heads * dv, gain=output_gain(config))
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def arrange(self, x, rows):
        return x

    def project(self, y, positions):
        """Normed input [T, H] → q, k [T, heads, 192] and v [T, heads, 128]."""
        c = self.config
        heads, dn, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        cos, sin = self.cos[positions], self.sin[positions]
        q = rms_norm(linear(y, self.q_a), self.q_a_norm, c["rms_norm_eps"]) if c["q_lora_rank"] else y
        q_nope, q_rope = linear(q, self.q_b).unflatten(-1, (heads, -1)).split([dn, c["qk_rope_head_dim"]], -1)
        latent, k_rope = linear(y, self.kv_a).split([rank, c["qk_rope_head_dim"]], -1)
        kv = linear(rms_norm(latent, self.kv_a_norm, c["rms_norm_eps"]), self.kv_b)
        k_nope, v = kv.unflatten(-1, (heads, -1)).split([dn, c["v_head_dim"]], -1)
        q_rope = rotate(q_rope, cos[:, None], sin[:, None])
        k_rope = rotate(k_rope, cos, sin)[:, None].expand(-1, heads, -1)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v.contiguous()

    def mix(self, parts, rows):
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def guidance(self, parts, rows, lookups):
        """Mean cross-entropy of the first heads' attention against the token that each lookup must find.

        parts as for mix; lookups [rows, n, 2]: a position and its source at or before it, -1 where there is none.
        """
        q, k = (t[:, :GUIDED_HEADS].unflatten(0, (rows, -1)).transpose(1, 2) for t in parts[:2])
        at, source = lookups.clamp_min(0)[:, None].expand(-1, GUIDED_HEADS, -1, -1).unbind(-1)
        q = q.gather(2, at[..., None].expand(-1, -1, -1, q.shape[-1]))
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        later = torch.arange(k.shape[2], device=k.device) > at[..., None]
        scores = scores.masked_fill(later, float("-inf"))
        loss = scores.logsumexp(-1) - scores.gather(-1, source[..., None]).squeeze(-1)
        valid = (lookups[..., 1] >= 0)[:, None].expand_as(loss)
        return (loss * valid).sum() / valid.sum().clamp_min(1)

    def finish(self, attended):
        return linear(attended, self.o)


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        h, inter = config["hidden_size"], config["moe_intermediate_size"]
        gain = output_gain(config)
        self.config, self.is_moe = config, index >= config["first_k_dense_replace"]
        self.input_norm, self.post_norm = ones(h), ones(h)
        self.attention = KdaAttention(config) if configs.is_kda(config, index) else MlaAttention(config)
        dense = inter * config["n_shared_experts"] if self.is_moe else config["intermediate_size"]
        self.gate, self.up, self.down = matrix(dense, h), matrix(dense, h), matrix(h, dense, gain=gain)
        if self.is_moe:
            experts = config["n_routed_experts"]
            self.router = matrix(experts, h)
            self.experts_gate, self.experts_up = matrix(experts, inter, h), matrix(experts, inter, h)
            self.experts_down = matrix(experts, h, inter, gain=gain)
            self.register_buffer("bias", torch.zeros(experts))

    def before_attention(self, x, positions):
        return self.attention.project(rms_norm(x, self.input_norm, self.config["rms_norm_eps"]), positions)

    def routed(self, y):
        weights, mask = route(y, self.router, self.bias, self.config)
        stored = (self.experts_gate, self.experts_up, self.experts_down)
        if not configs.is_kimi_linear(self.config):
            stored = map(quant.fake_quantise, stored)
        gate, up, down = stored
        act = F.silu(linear(y, gate.flatten(0, 1))) * linear(y, up.flatten(0, 1))
        act = act.unflatten(-1, (self.config["n_routed_experts"], -1)) * weights.to(y.dtype)[..., None]
        return linear(act.flatten(-2), down.transpose(0, 1).flatten(1)), mask.sum(0)

    def after_attention(self, x, mixed):
        """Output projection and MLP; returns the residual stream and the expert loads."""
        x = x + self.attention.finish(mixed)
        y = rms_norm(x, self.post_norm, self.config["rms_norm_eps"])
        out = swiglu(y, self.gate, self.up, self.down)
        if not self.is_moe:
            return x + out, None
        routed, load = self.routed(y)
        return x + out + routed, load


class TinyKimi(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.2)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = ones(c["hidden_size"])
        self.head = matrix(c["vocab_size"], c["hidden_size"], gain=0.5)
        self.before, self.after = Layer.before_attention, Layer.after_attention

    def compile(self):
        """The parts around attention see a fixed token count, so each is compiled once."""
        self.before = torch.compile(Layer.before_attention, dynamic=False)
        self.after = torch.compile(Layer.after_attention, dynamic=False)

    def forward(self, tokens, lookups=None):
        """tokens [rows, length] → normed hidden states [rows * length, H], expert loads, guidance losses of the MLA
        layers (none without lookups)."""
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        x = F.embedding(tokens.flatten(), self.embed.to(torch.bfloat16))
        loads, guidance = [], []
        for layer in self.layers:
            attention = layer.attention
            parts = self.before(layer, attention.arrange(x, rows), positions)
            if lookups is not None and isinstance(attention, MlaAttention):
                guidance.append(attention.guidance(parts, rows, lookups))
            x, load = self.after(layer, x, attention.mix(parts, rows))
            if load is not None:
                loads.append(load)
        return rms_norm(x, self.norm, self.config["rms_norm_eps"]), loads, guidance
