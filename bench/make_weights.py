"""Writes a model folder of random bf16 weights, to measure how long a real one takes to load.

    python3 bench/make_weights.py bench/models/v2-lite OUT [LAYERS]

OUT gets config.json and safetensors shards of up to 4 GB with every tensor that DeepSeek-V2-Lite has on the hub (softmax
router, no q_lora), of LAYERS layers (default: config.json's). Needs nothing but the standard library.
"""

import json
import os
import random
import struct
import sys

SHARD_BYTES = 4 << 30
TILE_BYTES = 1 << 20


def mlp(prefix, inter, hidden):
    return [(prefix + "gate_proj", (inter, hidden)), (prefix + "up_proj", (inter, hidden)),
            (prefix + "down_proj", (hidden, inter))]


def layer_tensors(c, index):
    """(name, shape) of one layer, without the ".weight" that all names end in."""
    at, h, heads = "model.layers.%d." % index, c["hidden_size"], c["num_attention_heads"]
    nope, rope, value, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    yield from ((at + "input_layernorm", (h,)), (at + "post_attention_layernorm", (h,)))
    attention = at + "self_attn."
    yield from ((attention + "q_proj", (heads * (nope + rope), h)), (attention + "kv_a_proj_with_mqa", (rank + rope, h)),
                (attention + "kv_a_layernorm", (rank,)), (attention + "kv_b_proj", (heads * (nope + value), rank)),
                (attention + "o_proj", (h, heads * value)))
    if index < c["first_k_dense_replace"]:
        yield from mlp(at + "mlp.", c["intermediate_size"], h)
        return
    inter = c["moe_intermediate_size"]
    yield at + "mlp.gate", (c["n_routed_experts"], h)
    yield from mlp(at + "mlp.shared_experts.", inter * c["n_shared_experts"], h)
    for expert in range(c["n_routed_experts"]):
        yield from mlp(at + "mlp.experts.%d." % expert, inter, h)


def tensors(c):
    vocab = (c["vocab_size"], c["hidden_size"])
    yield from (("model.embed_tokens", vocab), ("model.norm", (c["hidden_size"],)), ("lm_head", vocab))
    for index in range(c["num_hidden_layers"]):
        yield from layer_tensors(c, index)


def num_bytes(shape):
    size = 2
    for extent in shape:
        size *= extent
    return size


def tile():
    """Bf16 values of either sign between 0.0156 and 0.0311."""
    data = bytearray(random.Random(1).randbytes(TILE_BYTES))
    for i in range(1, TILE_BYTES, 2):
        data[i] = 0x3C if data[i] & 1 else 0xBC
        data[i - 1] |= 0x80
    return memoryview(bytes(data))


def write_shard(path, members, data):
    header, end = {}, 0
    for name, shape in members:
        header[name + ".weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + num_bytes(shape)]}
        end += num_bytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for left in range(end, 0, -TILE_BYTES):
            out.write(data[:min(left, TILE_BYTES)])


def main():
    with open(os.path.join(sys.argv[1], "config.json"), encoding="utf-8") as stored:
        config = json.load(stored)
    if len(sys.argv) > 3:
        config["num_hidden_layers"] = int(sys.argv[3])
    folder = sys.argv[2]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
        json.dump(config, out)
    shards, filled = [[]], 0
    for name, shape in tensors(config):
        if filled + num_bytes(shape) > SHARD_BYTES:
            shards, filled = shards + [[]], 0
        shards[-1].append((name, shape))
        filled += num_bytes(shape)
    names, data = {}, tile()
    for at, members in enumerate(shards):
        file = "model-%05d-of-%05d.safetensors" % (at + 1, len(shards))
        write_shard(os.path.join(folder, file), members, data)
        names.update((name + ".weight", file) for name, _ in members)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as out:
        json.dump({"weight_map": names}, out)


if __name__ == "__main__":
    main()
