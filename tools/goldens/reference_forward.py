"""Forward pass of DeepSeek-V2/V3-style models and Kimi-Linear in float64 NumPy, read straight from the raw config.

A second opinion beside transformers: written from the published formulas (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3,
arXiv 2412.19437; YaRN, arXiv 2309.00071; Kimi Linear, arXiv 2510.26692), sharing no code with it. Explicit MLA form,
token-by-token delta rule, no cache. Latent norms use their own eps.
"""

import numpy as np


def log_probabilities(config, tensors, ids, latent_norm_eps):
    """ids [T] to (log-probabilities [T, vocab], smallest routing margin [T]).

    config: the language model's raw config; tensors: {hub name without prefix: float64 array}.
    """
    return Forward(config, tensors, latent_norm_eps).run(np.asarray(ids))


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def mscale(factor, coefficient):
    return 1.0 if factor <= 1 else 0.1 * coefficient * np.log(factor) + 1


def inverse_frequencies(dim, theta, scaling):
    """[dim/2] angles per position of each rotated pair, YaRN-interpolated when scaling is given."""
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if not scaling:
        return plain

    def boundary(rotations):
        ratio = scaling["original_max_position_embeddings"] / (2 * np.pi * rotations)
        return dim * np.log(ratio) / (2 * np.log(theta))

    low = max(np.floor(boundary(scaling["beta_fast"])), 0)
    high = min(np.ceil(boundary(scaling["beta_slow"])), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def rotate_pairs(x, angles):
    """x [T, heads, d] rotated in pairs (2i, 2i+1) by angles [T, d/2]."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape)


class Forward:
    def __init__(self, config, tensors, latent_norm_eps):
        self.c, self.tensors, self.latent_eps = config, tensors, latent_norm_eps
        self.kimi_linear = config["model_type"] == "kimi_linear"

    def get(self, *keys):
        """The first of several spellings of a config value."""
        return next(self.c[key] for key in keys if key in self.c)

    def linear(self, x, name):
        return x @ self.tensors[name + ".weight"].T

    def norm(self, x, name, eps=None):
        return rms_norm(x, self.tensors[name + ".weight"], self.c["rms_norm_eps"] if eps is None else eps)

    def run(self, ids):
        x = self.tensors["model.embed_tokens.weight"][ids]
        self.margin = np.full(len(ids), np.inf)
        for layer in range(self.c["num_hidden_layers"]):
            base = "model.layers.%d." % layer
            delta = layer + 1 in self.c.get("linear_attn_config", {}).get("kda_layers", [])
            attention = self.delta_attention if delta else self.latent_attention
            x = x + attention(self.norm(x, base + "input_layernorm"), base + "self_attn.")
            y = self.norm(x, base + "post_attention_layernorm")
            if layer < self.c["first_k_dense_replace"]:
                x = x + self.mlp(y, base + "mlp.")
            else:
                x = x + self.experts(y, base + ("block_sparse_moe." if self.kimi_linear else "mlp."))
        logits = self.linear(self.norm(x, "model.norm"), "lm_head")
        top = logits.max(axis=-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)), self.margin

    def latent_attention(self, x, base):
        c, tokens, heads = self.c, len(x), self.c["num_attention_heads"]
        nope, rope, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c["q_lora_rank"] is None:
            q = self.linear(x, base + "q_proj")
        else:
            q = self.norm(self.linear(x, base + "q_a_proj"), base + "q_a_layernorm", self.latent_eps)
            q = self.linear(q, base + "q_b_proj")
        q = q.reshape(tokens, heads, nope + rope)
        compressed = self.linear(x, base + "kv_a_proj_with_mqa")
        kv = self.norm(compressed[:, :latent], base + "kv_a_layernorm", self.latent_eps)
        kv = self.linear(kv, base + "kv_b_proj").reshape(tokens, heads, nope + c["v_head_dim"])
        k_rope, q_rope, scale = compressed[:, None, latent:], q[..., nope:], (nope + rope) ** -0.5
        if not c.get("mla_use_nope", False):
            scaling = c.get("rope_scaling")
            angles = np.arange(tokens)[:, None] * inverse_frequencies(rope, c["rope_theta"], scaling)
            k_rope, q_rope = rotate_pairs(k_rope, angles), rotate_pairs(q_rope, angles)
            if scaling:
                scale = scale * mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        scores = np.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope])
        scores = scale * (scores + np.einsum("thd,sd->hts", q_rope, k_rope[:, 0]))
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        out = np.einsum("hts,shd->thd", softmax(scores), kv[..., nope:])
        return self.linear(out.reshape(tokens, -1), base + "o_proj")

    def delta_attention(self, x, base):
        linear = self.c["linear_attn_config"]
        heads, dim, tokens = linear["num_heads"], linear["head_dim"], len(x)
        q, k, v = (self.convolution(self.linear(x, base + n + "_proj"), base + n + "_conv1d.weight")
                   .reshape(tokens, heads, dim) for n in "qkv")
        raw = self.linear(self.linear(x, base + "f_a_proj"), base + "f_b_proj") + self.tensors[base + "dt_bias"]
        rate = np.exp(self.tensors[base + "A_log"].reshape(heads, 1))
        decay = np.exp(-rate * np.log1p(np.exp(raw)).reshape(tokens, heads, dim))
        beta = sigmoid(self.linear(x, base + "b_proj"))
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * dim**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        state, out = np.zeros((heads, dim, dim)), np.empty((tokens, heads, dim))
        for t in range(tokens):
            state = state * decay[t][:, :, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * error[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        gate = self.linear(self.linear(x, base + "g_a_proj"), base + "g_b_proj").reshape(tokens, heads, dim)
        return self.linear((self.norm(out, base + "o_norm") * sigmoid(gate)).reshape(tokens, -1), base + "o_proj")

    def convolution(self, x, name):
        """Causal depthwise convolution, then silu. Weight [channels, 1, taps]; the last tap meets the current token."""
        weight = self.tensors[name][:, 0]
        taps = weight.shape[1]
        padded = np.concatenate((np.zeros((taps - 1, x.shape[1])), x))
        y = sum(padded[j:j + len(x)] * weight[:, j] for j in range(taps))
        return y * sigmoid(y)

    def mlp(self, x, base, names=("gate_proj", "up_proj", "down_proj")):
        gate, up = self.linear(x, base + names[0]), self.linear(x, base + names[1])
        return self.linear(gate * sigmoid(gate) * up, base + names[2])

    def experts(self, x, base):
        names = ("w1", "w3", "w2") if self.kimi_linear else ("gate_proj", "up_proj", "down_proj")
        out = self.mlp(x, base + "shared_experts.")
        chosen, weights = self.route(x, base + "gate")
        for expert in np.unique(chosen):
            token, slot = np.nonzero(chosen == expert)
            out[token] += weights[token, slot, None] * self.mlp(x[token], "%sexperts.%d." % (base, expert), names)
        return out

    def route(self, x, base):
        """(expert ids [T, k], weights [T, k]); lowers self.margin to the smallest gap between taken and left out."""
        logits = self.linear(x, base)
        k = self.get("num_experts_per_tok", "num_experts_per_token")
        score = softmax if self.c.get("scoring_func") == "softmax" else sigmoid
        scores = score(logits)
        choice = scores + self.tensors.get(base + ".e_score_correction_bias", 0.0)
        groups, kept = self.get("n_group", "num_expert_group"), self.c["topk_group"]
        if groups > 1:
            choice = self.keep_groups(choice, groups, kept)
        order = np.argsort(-choice, axis=-1, kind="stable")
        self.lower_margin(np.take_along_axis(choice, order, -1), k)
        chosen = order[:, :k]
        weights = np.take_along_axis(scores, chosen, -1)
        if self.get("norm_topk_prob", "moe_renormalize"):
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return chosen, weights * self.c["routed_scaling_factor"]

    def keep_groups(self, choice, groups, kept):
        """choice [T, experts] with -inf outside the best groups; a group's score is the sum of its two best."""
        grouped = choice.reshape(len(choice), groups, -1)
        totals = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        order = np.argsort(-totals, axis=-1, kind="stable")
        self.lower_margin(np.take_along_axis(totals, order, -1), kept)
        mask = np.zeros(totals.shape, dtype=bool)
        np.put_along_axis(mask, order[:, :kept], True, axis=-1)
        return np.where(mask[..., None], grouped, -np.inf).reshape(choice.shape)

    def lower_margin(self, ordered, k):
        self.margin = np.minimum(self.margin, ordered[:, k - 1] - ordered[:, k])
