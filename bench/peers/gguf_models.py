"""Writes GGUF files of random weights for the geometries of bench/models, as llama.cpp reads them.

Experts are Q4_0 where config.json quantises them to INT4 (the same 4.5 bits a weight), the router and the norms f32, all
else bf16 or, beside Perigee's online INT8, Q8_0: what Perigee keeps of the same model. Two families: DeepSeek-V2 without q_lora, and Kimi-Linear. Names, shapes
and keys: llama.cpp's src/llama-arch.cpp and conversion/ of the pinned version. The vocabulary has no tokens, so prompts
are ids.
"""
import random
import struct

ALIGNMENT, TILE_VALUES = 32, 1 << 19
# llama.cpp's number of a type, values of a block, its bytes
TYPES = {"f32": (0, 1, 4), "q4": (2, 32, 18), "q8": (8, 32, 34), "bf16": (30, 1, 2)}


def num_bytes(kind, shape):
    _, values, size = TYPES[kind]
    for extent in shape:
        size *= extent
    return size // values


def ffn(at, kind, inter, hidden, suffix="", experts=()):
    """Shapes list the extent that lies together in memory first."""
    return [(f"{at}ffn_gate{suffix}.weight", kind, (hidden, inter, *experts)),
            (f"{at}ffn_up{suffix}.weight", kind, (hidden, inter, *experts)),
            (f"{at}ffn_down{suffix}.weight", kind, (inter, hidden, *experts))]


class Geometry:
    def __init__(self, config, dense="bf16"):
        """dense: of matrices but experts, up-projections of MLA and the embedding."""
        self.c, self.dense = config, dense
        self.linear = config.get("linear_attn_config")
        self.arch = "kimi-linear" if self.linear else "deepseek2"
        self.experts = config["num_experts" if self.linear else "n_routed_experts"]
        self.experts_used = config["num_experts_per_token" if self.linear else "num_experts_per_tok"]
        self.shared = config["num_shared_experts" if self.linear else "n_shared_experts"]
        self.expert_kind = "q4" if "quantization_config" in config else "bf16"

    def is_recurrent(self, layer):
        return self.linear is not None and layer + 1 in self.linear["kda_layers"]

    def mla(self, at):
        c = self.c
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        nope, rope, value, rank = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        return [(at + "attn_q.weight", self.dense, (hidden, heads * (nope + rope))),
                (at + "attn_kv_a_mqa.weight", self.dense, (hidden, rank + rope)),
                (at + "attn_kv_a_norm.weight", "f32", (rank,)),
                (at + "attn_k_b.weight", "bf16", (nope, rank, heads)),
                (at + "attn_v_b.weight", "bf16", (rank, value, heads)),
                (at + "attn_output.weight", self.dense, (heads * value, hidden))]

    def kda(self, at):
        hidden, size, heads = self.c["hidden_size"], self.linear["head_dim"], self.linear["num_heads"]
        inner, conv = size * heads, self.linear["short_conv_kernel_size"]
        return [(f"{at}attn_{x}.weight", self.dense, (hidden, inner)) for x in "qkv"] + \
            [(f"{at}ssm_conv1d_{x}.weight", "f32", (conv, 1, inner)) for x in "qkv"] + \
            [(f"{at}ssm_{x}_a.weight", self.dense, (hidden, size)) for x in "fg"] + \
            [(f"{at}ssm_{x}_b.weight", self.dense, (size, inner)) for x in "fg"] + \
            [(at + "ssm_beta.weight", self.dense, (hidden, heads)), (at + "ssm_a", "f32", (1, heads)),
             (at + "ssm_dt.bias", "f32", (inner,)), (at + "ssm_norm.weight", "f32", (size,)),
             (at + "attn_output.weight", self.dense, (inner, hidden))]

    def layer(self, index):
        c, at, hidden = self.c, f"blk.{index}.", self.c["hidden_size"]
        tensors = [(at + "attn_norm.weight", "f32", (hidden,)), (at + "ffn_norm.weight", "f32", (hidden,))]
        tensors += self.kda(at) if self.is_recurrent(index) else self.mla(at)
        if index < c["first_k_dense_replace"]:
            return tensors + ffn(at, self.dense, c["intermediate_size"], hidden)
        inter = c["moe_intermediate_size"]
        tensors.append((at + "ffn_gate_inp.weight", "f32", (hidden, self.experts)))
        if self.linear:
            tensors.append((at + "exp_probs_b.bias", "f32", (self.experts,)))
        return tensors + ffn(at, self.dense, inter * self.shared, hidden, "_shexp") + \
            ffn(at, self.expert_kind, inter, hidden, "_exps", (self.experts,))

    def tensors(self):
        vocab = (self.c["hidden_size"], self.c["vocab_size"])
        out = [("token_embd.weight", "bf16", vocab), ("output_norm.weight", "f32", vocab[:1]),
               ("output.weight", self.dense, vocab)]
        for index in range(self.c["num_hidden_layers"]):
            out += self.layer(index)
        return out

    def token_bytes(self):
        """Bytes of weights that a step of one token reads."""
        total = 0
        for name, kind, shape in self.tensors():
            size = num_bytes(kind, shape)
            if "_exps." in name:
                size = size * self.experts_used // self.experts
            total += 0 if name == "token_embd.weight" else size
        return total

    def keys(self):
        c = self.c
        rank, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
        layers = range(c["num_hidden_layers"])
        kv_heads = [0 if self.is_recurrent(i) else 1 for i in layers]
        out = {
            "vocab_size": c["vocab_size"], "context_length": 163840, "embedding_length": c["hidden_size"],
            "block_count": c["num_hidden_layers"], "feed_forward_length": c["intermediate_size"],
            "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": kv_heads if self.linear else 1,
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rope, "attention.value_length": rank,
            "attention.key_length_mla": c["qk_nope_head_dim"] + rope, "attention.value_length_mla": c["v_head_dim"],
            "attention.q_lora_rank": 0, "rope.dimension_count": rope, "rope.freq_base": float(c["rope_theta"]),
            "leading_dense_block_count": c["first_k_dense_replace"], "expert_count": self.experts,
            "expert_used_count": self.experts_used, "expert_shared_count": self.shared,
            "expert_feed_forward_length": c["moe_intermediate_size"],
            "expert_weights_scale": float(c["routed_scaling_factor"]), "expert_gating_func": 2 if self.linear else 1,
        }
        if self.linear:
            out |= {"ssm.conv_kernel": self.linear["short_conv_kernel_size"], "kda.head_dim": self.linear["head_dim"],
                    "expert_weights_norm": True}
        out = {f"{self.arch}.{key}": value for key, value in out.items()}
        return {"general.architecture": self.arch, "general.name": "random", "tokenizer.ggml.model": "no_vocab"} | out


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def tile(kind):
    """Values of either sign below 0.04."""
    rng = random.Random(1)
    if kind == "f32":
        return struct.pack(f"<{TILE_VALUES}f", *(rng.uniform(-0.03, 0.03) for _ in range(TILE_VALUES)))
    if kind == "bf16":
        data = bytearray(rng.randbytes(2 * TILE_VALUES))
        for i in range(1, len(data), 2):
            data[i] = 0x3C if data[i] & 1 else 0xBC
            data[i - 1] |= 0x80
        return bytes(data)
    step, size = (0.0045, 16) if kind == "q4" else (0.0003, 32)
    scales = [struct.pack("<e", step), struct.pack("<e", -step)]
    return b"".join(rng.choice(scales) + rng.randbytes(size) for _ in range(TILE_VALUES // 32))


def content(name, kind, size, tiles):
    if name.endswith("norm.weight") or name.endswith("ssm_a"):
        yield struct.pack("<f", -0.5 if name.endswith("ssm_a") else 1.0) * (size // 4)
        return
    data = memoryview(tiles[kind])
    for left in range(size, 0, -len(data)):
        yield data[:min(left, len(data))]


def write(config, path, dense="bf16"):
    geometry = Geometry(config, dense)
    tensors, keys = geometry.tensors(), geometry.keys()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(text(key) + typed(value) for key, value in keys.items())
    end = 0
    for name, kind, shape in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[kind][0], end)
        end += -(-num_bytes(kind, shape) // ALIGNMENT) * ALIGNMENT
    tiles = {kind: tile(kind) for kind in TYPES}
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGNMENT))
        for name, kind, shape in tensors:
            size = num_bytes(kind, shape)
            for part in content(name, kind, size, tiles):
                out.write(part)
            out.write(bytes(-size % ALIGNMENT))
