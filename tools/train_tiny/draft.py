"""Trains the EAGLE-3 draft of a bundled model on the model's own hidden states, and writes its folder.

    python3 draft.py --target ../../models/tiny-k2 --out ../../models/tiny-k2-eagle3-mla
    python3 draft.py --target ../../models/tiny-k2 --attention llama --out ../../models/tiny-k2-eagle3

The draft has one layer, with latent attention or with Llama's, and shares embedding and head (EAGLE-3, arXiv
2503.01840). At position p it reads what enters some layers of the target there, and the embedding of token p + 1. As in use, it is trained on
several passes: each one after the first reads the pass before it instead of the target. It learns the target's
distribution over the rows of train.py.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import bpe
import documents
import model as tiny
import reference
import train
from layers import linear, matrix, ones, rms_norm, swiglu

ROW_TOKENS = 1024
SEED = 4321
PASSES = 3
GOLDEN_ROWS = 70  # over a block
TAPS = {"tiny-k2": [0, 2, 3], "tiny-kimi-linear": [2, 4, 5]}
SIZES = {  # by target and attention
    ("tiny-k2", "latent"): {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64,
                            "intermediate_size": 256},
    ("tiny-k2", "llama"): {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32,
                           "intermediate_size": 256},
    ("tiny-kimi-linear", "latent"): {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64,
                                     "intermediate_size": 128},
}
ARCHITECTURES = {"latent": "Eagle3DeepseekV2ForCausalLM", "llama": "LlamaForCausalLMEagle3"}
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def draft_config(name, attention, target):
    """config.json of the draft, in the keys of Kimi's published drafts."""
    shared = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings",
              *(LATENT_SIZES if attention == "latent" else ()))
    return {**{key: target[key] for key in shared}, **SIZES[name, attention],
            "architectures": [ARCHITECTURES[attention]], "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None, "dtype": "bfloat16",
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                    "weight_block_size": [128, 128]},
            "draft_vocab_size": target["vocab_size"], "target_hidden_size": target["hidden_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS[name], "use_aux_hidden_state": True}}


class Target(reference.Reference):
    @torch.no_grad()
    def states(self, tokens, taps):
        """tokens [rows, length] → what enters the layers `taps` [rows, length, taps * H], logits [rows, length, vocab]."""
        lengths = torch.full((tokens.shape[0],), tokens.shape[1], device=self.device)
        x = self.weights["model.embed_tokens.weight"][tokens]
        tapped = []
        for layer in range(self.config["num_hidden_layers"]):
            if layer in taps:
                tapped.append(x.float())
            y = self.norm(x, layer, "input_layernorm")
            out, _ = (self.kda[layer].prefill(y, lengths) if layer in self.kda
                      else self.prefill_mla(y, layer, tokens.shape[1]))
            x = self.mlp(x + out, layer)
        return torch.cat(tapped, -1), self.logits(x).float()


def rope_tables(theta, dim):
    angles = (torch.arange(ROW_TOKENS, dtype=torch.float64)[:, None]
              * theta ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)[None, :])
    return angles.cos().float(), angles.sin().float()


class LatentAttention(nn.Module):
    """Projections [rows, length, 2H] → q, k [rows, heads, length, 192], v [rows, heads, length, 128] of one head each."""

    def __init__(self, config):
        super().__init__()
        self.c = c = config
        h, heads, rank, dr = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
        dn, dv = c["qk_nope_head_dim"], c["v_head_dim"]
        self.q_a, self.q_a_norm = matrix(c["q_lora_rank"], 2 * h), ones(c["q_lora_rank"])
        self.q_b = matrix(heads * (dn + dr), c["q_lora_rank"])
        self.kv_a, self.kv_a_norm = matrix(rank + dr, 2 * h), ones(rank)
        self.kv_b = matrix(heads * (dn + dv), rank)
        self.o = matrix(h, heads * dv, gain=0.5)
        for key, table in zip(("cos", "sin"), rope_tables(c["rope_theta"], dr)):
            self.register_buffer(key, table, persistent=False)

    def tensors(self):
        return {"q_a_proj": self.q_a, "q_a_layernorm": self.q_a_norm, "q_b_proj": self.q_b,
                "kv_a_proj_with_mqa": self.kv_a, "kv_a_layernorm": self.kv_a_norm, "kv_b_proj": self.kv_b,
                "o_proj": self.o}

    def forward(self, x):
        c, eps, length = self.c, self.c["rms_norm_eps"], x.shape[1]
        heads, dn, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        cos, sin = self.cos[:length], self.sin[:length]
        q = linear(rms_norm(linear(x, self.q_a), self.q_a_norm, eps), self.q_b).unflatten(-1, (heads, -1))
        latent, k_rope = linear(x, self.kv_a).split([rank, c["qk_rope_head_dim"]], -1)
        kv = linear(rms_norm(latent, self.kv_a_norm, eps), self.kv_b).unflatten(-1, (heads, -1))
        q = torch.cat((q[..., :dn], tiny.rotate(q[..., dn:], cos[:, None], sin[:, None])), -1)
        k_rope = tiny.rotate(k_rope, cos, sin)[:, :, None].expand(-1, -1, heads, -1)
        k = torch.cat((kv[..., :dn], k_rope), -1)
        return q.transpose(1, 2), k.transpose(1, 2), kv[..., dn:].transpose(1, 2)


class LlamaAttention(nn.Module):
    """The same with keys and values by head, each for a group of query heads; pairs of rope are (i, i + dim / 2)."""

    def __init__(self, config):
        super().__init__()
        self.c = c = config
        h, dim = c["hidden_size"], c["head_dim"]
        self.q, self.o = matrix(c["num_attention_heads"] * dim, 2 * h), matrix(h, c["num_attention_heads"] * dim, gain=0.5)
        self.k, self.v = (matrix(c["num_key_value_heads"] * dim, 2 * h) for _ in range(2))
        for key, table in zip(("cos", "sin"), rope_tables(c["rope_theta"], dim)):
            self.register_buffer(key, table, persistent=False)

    def tensors(self):
        return {"q_proj": self.q, "k_proj": self.k, "v_proj": self.v, "o_proj": self.o}

    def forward(self, x):
        dim, length = self.c["head_dim"], x.shape[1]
        group = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        cos, sin = self.cos[:length], self.sin[:length]

        def rotated(y):
            first, second = y[..., :dim // 2], y[..., dim // 2:]
            return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

        q, k, v = (linear(x, w).unflatten(-1, (-1, dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class Draft(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c = c = config
        h, inter = c["hidden_size"], c["intermediate_size"]
        self.fc = matrix(h, h * len(c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]))
        self.embedding_norm, self.hidden_norm, self.post_norm, self.norm = ones(h), ones(h), ones(h), ones(h)
        self.attention = (LatentAttention if "kv_lora_rank" in c else LlamaAttention)(c)
        self.gate, self.up, self.down = matrix(inter, h), matrix(inter, h), matrix(h, inter, gain=0.5)

    def tensors(self):
        """{name in the draft's file: parameter}."""
        layer = {"input_layernorm": self.embedding_norm, "hidden_norm": self.hidden_norm,
                 "post_attention_layernorm": self.post_norm,
                 **{"self_attn." + name: parameter for name, parameter in self.attention.tensors().items()},
                 "mlp.gate_proj": self.gate, "mlp.up_proj": self.up, "mlp.down_proj": self.down}
        return {"fc.weight": self.fc, "norm.weight": self.norm,
                **{"midlayer.%s.weight" % name: parameter for name, parameter in layer.items()}}

    def attend(self, q, keys, values):
        """keys and values of the passes up to this one. A row of pass s reads keys of pass 1 up to s - 1 rows before it,
        of pass 2 those of one row, ..., of pass s its own."""
        scale, length, late = q.shape[-1] ** -0.5, q.shape[2], len(keys) - 1
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-late)
        scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
        moved = [(shift(k, late - at), shift(v, late - at)) for at, (k, v) in enumerate(zip(keys, values)) if at > 0]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in moved]
        shares = torch.cat(scores, -1).softmax(-1)
        out = shares[..., :length] @ values[0]
        for at, (_, v) in enumerate(moved):
            out = out + shares[..., length + at, None] * v
        return out.transpose(1, 2).flatten(-2)

    def run_pass(self, hidden, embedded, keys, values):
        """One pass; adds its keys and values. → what the next pass reads [rows, length, H]."""
        eps = self.c["rms_norm_eps"]
        x = torch.cat((rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)), -1)
        q, k, v = self.attention(x)
        keys.append(k)
        values.append(v)
        x = hidden + linear(self.attend(q, keys, values), self.attention.o)
        return x + swiglu(rms_norm(x, self.post_norm, eps), self.gate, self.up, self.down)

    def forward(self, taps, embedded, head):
        """taps [rows, length, taps * H] and embeddings of the tokens after → logits of every pass."""
        hidden, keys, values, logits = linear(taps, self.fc), [], [], []
        for _ in range(PASSES):
            hidden = self.run_pass(hidden, embedded, keys, values)
            logits.append(F.linear(rms_norm(hidden, self.norm, self.c["rms_norm_eps"]), head))
            hidden = shift(hidden, 1, dim=1)
        return logits


def shift(x, by, dim=2):
    """Rows `by` further on; zeros come first."""
    if by == 0:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), kept), dim)


class RowMaker:
    def __init__(self, builder, rows):
        self.builder, self.rows = builder, rows

    def __call__(self, step):
        rng = random.Random(SEED * 1000003 + step)
        made = [self.builder.short_row(rng, ROW_TOKENS) for _ in range(self.rows)]
        return np.array([row for row, _ in made], np.int16), np.array([labels for _, labels in made], np.int16)


def losses(draft, target, tokens, labels):
    """Mean loss of the passes over what the model itself writes, and whether each pass is right there [n, passes].

    Row p predicts what the target says at p + 1. The chain that begins at a row goes on one row further with each pass.
    """
    taps, judge = target.states(tokens, draft.c["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    embedded = target.weights["model.embed_tokens.weight"][tokens[:, 1:]].float()
    logits = draft(taps[:, :-1], embedded, target.weights["lm_head.weight"].float())
    judge = judge[:, 1:]
    own = labels[:, 1:] >= 0
    total, right = 0.0, []
    for at, guess in enumerate(logits):
        kept = own.clone()
        kept[:, :at] = False
        wanted = judge[kept].softmax(-1)
        total = total + 0.8 ** at * -(wanted * guess[kept].log_softmax(-1)).sum(-1).mean()
        hits = (guess.argmax(-1) == judge.argmax(-1)) & own
        right.append(torch.cat((hits[:, at:], torch.zeros_like(hits[:, :at])), 1))
    return total, torch.stack(right, -1)[own].cumprod(-1).float().mean(0)


def store(out, name, weight):
    """Norms as they are; matrices in e4m3 with a scale for each 128 x 128 (DeepSeek-V3's form), to keep the files small."""
    if weight.dim() == 1:
        out[name] = weight
        return
    rows, columns = weight.shape
    blocks = F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    out[name], out[name + "_scale_inv"] = codes[:rows, :columns].contiguous(), scale.contiguous()


def restore(stored, name):
    """A stored tensor's numbers in f32."""
    weight = stored[name].float()
    if name + "_scale_inv" in stored:
        scale = stored[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = weight * scale[:weight.shape[0], :weight.shape[1]]
    return weight


@torch.no_grad()
def write_golden(path, draft, stored, target):
    """What the stored draft makes of made-up hidden states, in f32 on the CPU: for tests/golden/draft_test.

    Logits of some ids: of each row of the first pass, and of the two passes after the last row but two.
    """
    draft = draft.to("cpu")
    for name, parameter in draft.tensors().items():
        parameter.copy_(restore(stored, name))
    weights = {name: target.weights[name].float().cpu() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    width = draft.fc.shape[1]
    row, column = torch.arange(GOLDEN_ROWS)[:, None], torch.arange(width)[None, :]
    taps = ((row * 7919 + column * 10477) % 511 - 255).float() / 128
    tokens = (7 * torch.arange(GOLDEN_ROWS) ** 2 + 3) % 2000
    logits = draft(taps[None], weights["model.embed_tokens.weight"][tokens][None], weights["lm_head.weight"])
    ids = list(range(0, logits[0].shape[-1], 191))
    passes = [logits[0][0, :-2], logits[1][0, -2:-1], logits[2][0, -1:]]
    golden = {"ids": ids, "logits": [[float("%.7g" % x) for x in row[ids].tolist()] for rows in passes for row in rows]}
    with open(path, "w", newline="\n") as out:
        out.write(json.dumps(golden) + "\n")


def run(args):
    with open(os.path.join(args.target, "config.json")) as text:
        name = "tiny-kimi-linear" if "linear_attn_config" in json.load(text) else "tiny-k2"
    builder = documents.RowBuilder(bpe.Tokenizer(os.path.join(args.target, "tiktoken.model")), name)
    pool = multiprocessing.get_context("fork").Pool(args.workers)  # before the GPU is touched
    batches = pool.imap(RowMaker(builder, args.rows), range(args.steps), chunksize=4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    target = Target(args.target, device)
    config = draft_config(name, args.attention, target.config)
    draft = Draft(config).to(device)
    optimiser = train.make_optimiser(draft)
    start, accepted = time.time(), None
    for step, (rows, labels) in enumerate(batches):
        tokens, labels = (torch.from_numpy(x).to(device, torch.int64) for x in (rows, labels))
        at = max(step / args.steps, (time.time() - start) / args.max_seconds if args.max_seconds else 0)
        if at >= 1:
            break
        loss, right = losses(draft, target, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = train.learning_rate(at * args.steps, args.steps, args.rate)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        accepted = right if accepted is None else 0.95 * accepted + 0.05 * right
        if (step + 1) % args.log_every == 0 or step == 0:
            print("step %d loss %.4f accepted by place %s mean length %.2f, %.0f s"
                  % (step + 1, loss.item(), ["%.3f" % a for a in accepted.tolist()], 1 + accepted.sum().item(),
                     time.time() - start), flush=True)
        if math.isnan(loss.item()):
            raise SystemExit("the loss is not a number")
    pool.terminate()
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "config.json"), "w", newline="\n") as out:
        out.write(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = {}
    for key, value in draft.tensors().items():
        store(stored, key, value.detach().to("cpu", torch.bfloat16))
    save_file(stored, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})
    print("wrote %s: %.2f MB" % (args.out, sum(t.nbytes for t in stored.values()) * 1e-6))
    if args.golden:
        write_golden(args.golden, draft, stored, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--attention", choices=sorted(ARCHITECTURES), default="latent")
    parser.add_argument("--golden", help="where to write the logits of some rows, of the stored weights")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=32, help="of %d tokens in a step" % ROW_TOKENS)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--max-seconds", type=float, default=0, help="cuts the schedule to fit into that time")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--log-every", type=int, default=50)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
