"""PyTorch reference of the stored model: loads the folder, generates greedily.

bf16 weights (INT4 experts dequantised once). MLA: prefill in the explicit form,
decoding in the absorbed form over the [latent | rope key] cache. KDA: prefill in
the chunk form, decoding by the recurrence.
"""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import bpe
import configs
import kda
import model as tiny
import quant


class Reference:
    def __init__(self, folder, device):
        with open(os.path.join(folder, "config.json")) as text:
            self.config = configs.from_hub(json.load(text))
        self.device = device
        self.weights = {k: v.to(device) for k, v in load_file(os.path.join(folder, "model.safetensors")).items()}
        self.linear = configs.is_kimi_linear(self.config)
        self.moe = "block_sparse_moe." if self.linear else "mlp."
        layers = range(self.config["num_hidden_layers"])
        self.experts = {i: self._experts(i) for i in layers if i >= self.config["first_k_dense_replace"]}
        self.kda = {i: self._kda(i) for i in layers if configs.is_kda(self.config, i)}
        self.cos, self.sin = (table.to(device) for table in tiny.rope_tables(self.config))
        self.scale = tiny.softmax_scale(self.config)

    def _kda(self, layer):
        prefix = "model.layers.%d.self_attn." % layer
        return kda.KdaAttention(self.config).from_hub(lambda name: self.weights[prefix + name])

    def _experts(self, layer):
        """bf16 [experts, out, in] of gate, up and down."""
        base = "model.layers.%d.%sexperts." % (layer, self.moe)
        names = ("w1", "w3", "w2") if self.linear else ("gate_proj", "up_proj", "down_proj")
        experts = range(self.config["n_routed_experts"])
        return [torch.stack([self._expert("%s%d.%s." % (base, expert, name)) for expert in experts]) for name in names]

    def _expert(self, base):
        if base + "weight" in self.weights:
            return self.weights[base + "weight"]
        return quant.dequantise(quant.unpack(self.weights[base + "weight_packed"]), self.weights[base + "weight_scale"])

    def w(self, layer, name):
        return self.weights["model.layers.%d.%s.weight" % (layer, name)]

    def norm(self, x, layer, name):
        return tiny.rms_norm(x, self.w(layer, name), self.config["rms_norm_eps"])

    def query(self, y, layer):
        if not self.config["q_lora_rank"]:
            return F.linear(y, self.w(layer, "self_attn.q_proj"))
        q = F.linear(y, self.w(layer, "self_attn.q_a_proj"))
        return F.linear(self.norm(q, layer, "self_attn.q_a_layernorm"), self.w(layer, "self_attn.q_b_proj"))

    def project(self, y, layer, positions):
        """Normed [..., H] → q_nope, rotated q_rope, and the cache entry [latent | rope key]."""
        c = self.config
        cos, sin = self.cos[positions], self.sin[positions]
        q = self.query(y, layer)
        q_nope, q_rope = q.unflatten(-1, (c["num_attention_heads"], -1)).split(
            [c["qk_nope_head_dim"], c["qk_rope_head_dim"]], -1)
        kv = F.linear(y, self.w(layer, "self_attn.kv_a_proj_with_mqa"))
        latent, k_rope = kv.split([c["kv_lora_rank"], c["qk_rope_head_dim"]], -1)
        entry = torch.cat((self.norm(latent, layer, "self_attn.kv_a_layernorm"),
                           tiny.rotate(k_rope, cos, sin)), -1)
        return q_nope, tiny.rotate(q_rope, cos[..., None, :], sin[..., None, :]), entry

    def kv_b(self, layer):
        """W_UK [heads, 128, 512] and W_UV [heads, 128, 512]."""
        c = self.config
        both = self.w(layer, "self_attn.kv_b_proj").unflatten(0, (c["num_attention_heads"], -1))
        return both.split([c["qk_nope_head_dim"], c["v_head_dim"]], 1)

    def explicit_attention(self, layer, q_nope, q_rope, entry):
        """Prefill of [rows, length, ...]: keys and values built per head."""
        rank = self.config["kv_lora_rank"]
        uk, uv = self.kv_b(layer)
        latent, k_rope = entry[..., :rank], entry[..., rank:]
        k_nope = torch.einsum("blr,hdr->bhld", latent, uk)
        v = torch.einsum("blr,hdr->bhld", latent, uv)
        k = torch.cat((k_nope, k_rope[:, None].expand(-1, uk.shape[0], -1, -1)), -1)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.contiguous(), is_causal=True, scale=self.scale)
        return out.transpose(1, 2).flatten(-2)

    def absorbed_attention(self, layer, q_nope, q_rope, cache, lengths):
        """One query per row over its cache [rows, capacity, 576]."""
        rank = self.config["kv_lora_rank"]
        uk, uv = self.kv_b(layer)
        query = torch.cat((torch.einsum("bhd,hdr->bhr", q_nope, uk), q_rope), -1)
        scores = torch.einsum("bhe,bse->bhs", query, cache).float() * self.scale
        open_to = torch.arange(cache.shape[1], device=cache.device)[None, :] < lengths[:, None]
        scores = scores.masked_fill(~open_to[:, None], float("-inf")).softmax(-1).to(cache.dtype)
        mixed = torch.einsum("bhs,bsr->bhr", scores, cache[..., :rank])
        return torch.einsum("bhr,hdr->bhd", mixed, uv).flatten(-2)

    def mlp(self, x, layer):
        y = self.norm(x, layer, "post_attention_layernorm")
        moe = layer in self.experts
        base = self.moe + "shared_experts." if moe else "mlp."
        out = tiny.swiglu(y, *(self.w(layer, base + name + "_proj") for name in ("gate", "up", "down")))
        return x + out + self.routed(y, layer) if moe else x + out

    def routed(self, y, layer):
        gate, up, down = self.experts[layer]
        bias = self.weights["model.layers.%d.%sgate.e_score_correction_bias" % (layer, self.moe)]
        weights, _ = tiny.route(y, self.w(layer, self.moe + "gate"), bias, self.config)
        act = F.silu(F.linear(y, gate.flatten(0, 1))) * F.linear(y, up.flatten(0, 1))
        total = torch.zeros_like(y, dtype=torch.float32)
        for expert, part in enumerate(act.unflatten(-1, (gate.shape[0], -1)).unbind(-2)):
            total += F.linear(part, down[expert]).float() * weights[..., expert, None]
        return total.to(y.dtype)

    def logits(self, x):
        y = tiny.rms_norm(x, self.weights["model.norm.weight"], self.config["rms_norm_eps"])
        return F.linear(y, self.weights["lm_head.weight"])

    def prefill_mla(self, y, layer, capacity):
        """Normed [rows, length, H] → output and cache."""
        q_nope, q_rope, entry = self.project(y, layer, torch.arange(y.shape[1], device=self.device))
        attended = self.explicit_attention(layer, q_nope, q_rope, entry)
        cache = F.pad(entry, (0, 0, 0, capacity - y.shape[1]))
        return F.linear(attended, self.w(layer, "self_attn.o_proj")), cache

    def prefill(self, tokens, lengths, capacity):
        """tokens [rows, length] padded at the end → hidden states [rows, length, H] and caches."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        caches = []
        for layer in range(self.config["num_hidden_layers"]):
            y = self.norm(x, layer, "input_layernorm")
            out, cache = (self.kda[layer].prefill(y, lengths) if layer in self.kda
                          else self.prefill_mla(y, layer, capacity))
            x = self.mlp(x + out, layer)
            caches.append(cache)
        return x, caches

    def decode_mla(self, y, layer, lengths, cache):
        q_nope, q_rope, entry = self.project(y, layer, lengths)
        cache[torch.arange(len(y), device=self.device), lengths] = entry
        attended = self.absorbed_attention(layer, q_nope, q_rope, cache, lengths + 1)
        return F.linear(attended, self.w(layer, "self_attn.o_proj"))

    def decode(self, token, lengths, caches):
        """One step: token [rows] at position lengths [rows]; the caches are replaced or written."""
        x = self.weights["model.embed_tokens.weight"][token]
        for layer, cache in enumerate(caches):
            y = self.norm(x, layer, "input_layernorm")
            if layer in self.kda:
                out, caches[layer] = self.kda[layer].step(y, cache)
            else:
                out = self.decode_mla(y, layer, lengths, cache)
            x = self.mlp(x + out, layer)
        return self.logits(x)

    @torch.no_grad()
    def generate_batch(self, prompts, limit):
        """Greedy continuations of token lists, without the stop token."""
        width = max(map(len, prompts))
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        tokens = torch.tensor([p + [bpe.PAD] * (width - len(p)) for p in prompts], device=self.device)
        capacity = min(width + limit, self.config["max_position_embeddings"])
        x, caches = self.prefill(tokens, lengths, capacity)
        logits = self.logits(x[torch.arange(len(lengths)), lengths - 1])
        out, alive = [], torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        for _ in range(capacity - width):
            token = logits.argmax(-1)
            alive = alive & (token != bpe.EOS) & (token != bpe.IM_END)
            out.append(torch.where(alive, token, -1))
            if not alive.any():
                break
            logits = self.decode(token, lengths, caches)
            lengths = lengths + 1
        return [[t for t in row if t >= 0] for row in torch.stack(out, 1).tolist()]

    def generate(self, prompts, limit, token_budget=131072):
        """Batches of similar length; results in the order of the prompts."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out, batch = [None] * len(prompts), []
        for place, index in enumerate(order):
            batch.append(index)
            following = len(prompts[order[place + 1]]) + limit if place + 1 < len(order) else 1 << 30
            if (len(batch) + 1) * following > token_budget:
                for i, tokens in zip(batch, self.generate_batch([prompts[i] for i in batch], limit)):
                    out[i] = tokens
                batch = []
        return out
