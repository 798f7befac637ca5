"""Writes the model folder from a training state.

    python3 export.py --state STATE --out ../../models/tiny-k2

chat_template.jinja and README.md of the folder are written by hand and stay as
they are; tiktoken.model comes from `data.py --vocabulary`. Both models have the
same template and vocabulary.
"""

import argparse
import json
import os

import torch
from safetensors.torch import save_file

import bpe
import configs
import model as tiny
import quant


def tokenizer_config():
    added = {}
    for offset, (name, special) in sorted(bpe.NAMED.items()):
        added[str(bpe.RANKS + offset)] = {"content": name, "lstrip": False, "normalized": False,
                                          "rstrip": False, "single_word": False, "special": special}
    extra = [name for _, (name, special) in sorted(bpe.NAMED.items()) if special
             and name not in ("[BOS]", "[EOS]", "[UNK]", "[PAD]")]
    return {"added_tokens_decoder": added, "additional_special_tokens": extra,
            "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
            "clean_up_tokenization_spaces": False, "extra_special_tokens": {},
            "model_max_length": configs.SHARED["max_position_embeddings"],
            "tokenizer_class": "TikTokenTokenizer"}


_MLA = {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj"}
_KIMI_LINEAR_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}


def attention_tensors(attention, config):
    """{name below self_attn: stored tensor}."""
    if hasattr(attention, "to_hub"):
        return attention.to_hub()
    names = _MLA if config["q_lora_rank"] else {**_MLA, "q_b": "q_proj"}
    return {names[mine] + ".weight": parameter.to(torch.bfloat16) for mine, parameter in attention.named_parameters()}


def add_experts(out, base, stacked, int4):
    """One stacked [experts, out, in] matrix as tensors per expert; `base` % expert is the name, suffix left out."""
    for expert, weight in enumerate(stacked):
        name = base % expert
        if not int4:
            out[name + "weight"] = weight.to(torch.bfloat16)
            continue
        q, scale = quant.quantise(weight)
        out[name + "weight_packed"] = quant.pack(q)
        out[name + "weight_scale"] = scale
        out[name + "weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)


def mlp_tensors(out, layer, prefix):
    """`prefix` ends in the layer's number and a dot."""
    linear = configs.is_kimi_linear(layer.config)
    block = prefix + ("block_sparse_moe." if linear and layer.is_moe else "mlp.")
    dense = block + "shared_experts." if layer.is_moe else block
    for name in ("gate", "up", "down"):
        out["%s%s_proj.weight" % (dense, name)] = getattr(layer, name).to(torch.bfloat16)
        if layer.is_moe:
            theirs = _KIMI_LINEAR_EXPERTS[name] if linear else name + "_proj"
            add_experts(out, "%sexperts.%%d.%s." % (block, theirs), getattr(layer, "experts_" + name), not linear)
    if layer.is_moe:
        out[block + "gate.weight"] = layer.router.to(torch.bfloat16)
        out[block + "gate.e_score_correction_bias"] = layer.bias.float()


def layer_tensors(out, layer, prefix):
    out[prefix + "input_layernorm.weight"] = layer.input_norm.to(torch.bfloat16)
    out[prefix + "post_attention_layernorm.weight"] = layer.post_norm.to(torch.bfloat16)
    for name, tensor in attention_tensors(layer.attention, layer.config).items():
        out[prefix + "self_attn." + name] = tensor
    mlp_tensors(out, layer, prefix)


@torch.no_grad()
def tensors(net):
    out = {"model.embed_tokens.weight": net.embed.to(torch.bfloat16),
           "model.norm.weight": net.norm.to(torch.bfloat16),
           "lm_head.weight": net.head.to(torch.bfloat16)}
    for index, layer in enumerate(net.layers):
        layer_tensors(out, layer, "model.layers.%d." % index)
    return {name: out[name].contiguous() for name in sorted(out)}


def write_json(path, value):
    with open(path, "w", newline="\n") as out:
        out.write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    state = torch.load(args.state, map_location="cpu", weights_only=True)
    net = tiny.TinyKimi(configs.CONFIGS[state["model"]])
    net.load_state_dict(state["net"])
    write_json(os.path.join(args.out, "config.json"), configs.to_hub(net.config))
    write_json(os.path.join(args.out, "tokenizer_config.json"), tokenizer_config())
    write_json(os.path.join(args.out, "generation_config.json"),
               {"bos_token_id": bpe.RANKS, "eos_token_id": [bpe.EOS, bpe.IM_END], "pad_token_id": bpe.PAD,
                "do_sample": True, "temperature": 1.0, "top_p": 0.95})
    save_file(tensors(net), os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
