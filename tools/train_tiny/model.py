"""The tiny Kimi-K2 network for training (PyTorch).

Master weights are f32; the forward pass uses them rounded to bf16, routed
experts rounded to INT4. All sixteen experts are computed and masked by the
routing weights: at this size that is faster than gathering tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import quant

CONFIG = {
    "vocab_size": 2304, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "max_position_embeddings": 16384,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                     "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def yarn_frequencies(config):
    """Inverse frequencies of the rotary pairs, f64."""
    scaling, dim = config["rope_scaling"], config["qk_rope_head_dim"]
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
    m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * m * m


def rope_tables(config, device):
    """cos and sin [max positions, 32], f32; the K2 mscale rule leaves them unscaled."""
    positions = torch.arange(config["max_position_embeddings"], dtype=torch.float64)
    angles = positions[:, None] * yarn_frequencies(config)[None, :]
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x, cos, sin):
    """Interleaved pairs (x[2i], x[2i+1]); cos and sin broadcast over [..., 32]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def rms_norm(x, weight, eps):
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def route(x, gate, bias, config):
    """f32 weights [tokens, experts], zero for experts that were not chosen."""
    scores = torch.sigmoid(F.linear(x.float(), gate.to(torch.bfloat16).float()))
    chosen = torch.topk(scores + bias, config["num_experts_per_tok"], dim=-1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    weights = scores * mask
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config["routed_scaling_factor"], mask


def swiglu(x, gate, up, down):
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def matrix(*shape, gain=1.0):
    return nn.Parameter(torch.randn(*shape) * gain / math.sqrt(shape[-1]))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        h, heads, inter = config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]
        dn, dr, dv = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
        out_gain = 0.5 / math.sqrt(config["num_hidden_layers"])
        self.config, self.is_moe = config, index >= config["first_k_dense_replace"]
        self.input_norm = nn.Parameter(torch.ones(h))
        self.post_norm = nn.Parameter(torch.ones(h))
        self.q_a, self.q_a_norm = matrix(q_rank, h), nn.Parameter(torch.ones(q_rank))
        self.q_b = matrix(heads * (dn + dr), q_rank)
        self.kv_a, self.kv_a_norm = matrix(rank + dr, h), nn.Parameter(torch.ones(rank))
        self.kv_b = matrix(heads * (dn + dv), rank)
        self.o = matrix(h, heads * dv, gain=out_gain)
        dense = inter * config["n_shared_experts"] if self.is_moe else config["intermediate_size"]
        self.gate, self.up = matrix(dense, h), matrix(dense, h)
        self.down = matrix(h, dense, gain=out_gain)
        if self.is_moe:
            experts = config["n_routed_experts"]
            self.router = matrix(experts, h)
            self.experts_gate, self.experts_up = matrix(experts, inter, h), matrix(experts, inter, h)
            self.experts_down = matrix(experts, h, inter, gain=out_gain)
            self.register_buffer("bias", torch.zeros(experts))

    def before_attention(self, x, cos, sin):
        """[T, H] → q, k [T, heads, 192] and v [T, heads, 128]."""
        c = self.config
        heads, dn, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        y = rms_norm(x, self.input_norm, c["rms_norm_eps"])
        q = linear(rms_norm(linear(y, self.q_a), self.q_a_norm, c["rms_norm_eps"]), self.q_b)
        q_nope, q_rope = q.unflatten(-1, (heads, -1)).split([dn, c["qk_rope_head_dim"]], -1)
        latent, k_rope = linear(y, self.kv_a).split([rank, c["qk_rope_head_dim"]], -1)
        kv = linear(rms_norm(latent, self.kv_a_norm, c["rms_norm_eps"]), self.kv_b)
        k_nope, v = kv.unflatten(-1, (heads, -1)).split([dn, c["v_head_dim"]], -1)
        q_rope = rotate(q_rope, cos[:, None], sin[:, None])
        k_rope = rotate(k_rope, cos, sin)[:, None].expand(-1, heads, -1)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v.contiguous()

    def routed(self, y):
        weights, mask = route(y, self.router, self.bias, self.config)
        gate, up, down = (quant.fake_quantise(w) for w in (self.experts_gate, self.experts_up, self.experts_down))
        act = F.silu(linear(y, gate.flatten(0, 1))) * linear(y, up.flatten(0, 1))
        act = act.unflatten(-1, (self.config["n_routed_experts"], -1)) * weights.to(y.dtype)[..., None]
        return linear(act.flatten(-2), down.transpose(0, 1).flatten(1)), mask.sum(0)

    def after_attention(self, x, attended):
        """Output projection and MLP; returns the residual stream and the expert loads."""
        x = x + linear(attended, self.o)
        y = rms_norm(x, self.post_norm, self.config["rms_norm_eps"])
        out = swiglu(y, self.gate, self.up, self.down)
        if not self.is_moe:
            return x + out, None
        routed, load = self.routed(y)
        return x + out + routed, load


class TinyK2(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.config = config or CONFIG
        c = self.config
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.2)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(c["hidden_size"]))
        self.head = matrix(c["vocab_size"], c["hidden_size"], gain=0.5)
        self.scale = softmax_scale(c)
        self.before, self.after = Layer.before_attention, Layer.after_attention

    def compile(self):
        """The parts around attention see a fixed token count, so each is compiled once."""
        self.before = torch.compile(Layer.before_attention, dynamic=False)
        self.after = torch.compile(Layer.after_attention, dynamic=False)

    def attention(self, q, k, v, rows):
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
        if self.config.get("pad_values"):
            v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out[..., :self.config["v_head_dim"]].transpose(1, 2).flatten(0, 1).flatten(1)

    def forward(self, tokens, cos, sin):
        """tokens [rows, length] → normed hidden states [rows * length, H], expert loads."""
        rows, length = tokens.shape
        cos, sin = cos[:length].repeat(rows, 1), sin[:length].repeat(rows, 1)
        x = self.embed.to(torch.bfloat16)[tokens.flatten()]
        loads = []
        for layer in self.layers:
            q, k, v = self.before(layer, x, cos, sin)
            x, load = self.after(layer, x, self.attention(q, k, v, rows))
            if load is not None:
                loads.append(load)
        return rms_norm(x, self.norm, self.config["rms_norm_eps"]), loads
