"""Writes the model folder from a training state.

    python3 export.py --state STATE --out ../../models/tiny-k2

chat_template.jinja and README.md of the folder are written by hand and stay as
they are; tiktoken.model comes from `data.py --vocabulary`.
"""

import argparse
import json
import os

import torch
from safetensors.torch import save_file

import bpe
import model as tiny
import quant


def quantisation_block():
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": quant.GROUP,
               "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
               "symmetric": True, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed"}


def config_json(config):
    out = dict(config)
    out.update({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "bos_token_id": bpe.RANKS, "eos_token_id": bpe.IM_END, "pad_token_id": bpe.PAD,
        "dtype": "bfloat16", "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "num_key_value_heads": config["num_attention_heads"], "num_nextn_predict_layers": 0,
        "pretraining_tp": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True,
        "tie_word_embeddings": False, "use_cache": True, "quantization_config": quantisation_block(),
    })
    return out


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
            "model_max_length": tiny.CONFIG["max_position_embeddings"],
            "tokenizer_class": "TikTokenTokenizer"}


_ATTENTION = {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj",
              "kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj"}
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


def add_experts(out, prefix, stacked, name):
    """One stacked [experts, out, in] matrix as packed tensors per expert."""
    for expert in range(stacked.shape[0]):
        q, scale = quant.quantise(stacked[expert])
        base = "%smlp.experts.%d.%s_proj." % (prefix, expert, name)
        out[base + "weight_packed"] = quant.pack(q)
        out[base + "weight_scale"] = scale
        out[base + "weight_shape"] = torch.tensor(stacked.shape[1:], dtype=torch.int32)


def layer_tensors(out, net, index):
    layer, prefix = net.layers[index], "model.layers.%d." % index

    def put(name, parameter):
        out[prefix + name + ".weight"] = parameter.to(torch.bfloat16)

    for mine, theirs in _NORMS.items():
        put(theirs, getattr(layer, mine))
    for mine, theirs in _ATTENTION.items():
        put("self_attn." + theirs, getattr(layer, mine))
    dense = "mlp.shared_experts." if layer.is_moe else "mlp."
    for name in ("gate", "up", "down"):
        put(dense + name + "_proj", getattr(layer, name))
        if layer.is_moe:
            add_experts(out, prefix, getattr(layer, "experts_" + name), name)
    if layer.is_moe:
        put("mlp.gate", layer.router)
        out[prefix + "mlp.gate.e_score_correction_bias"] = layer.bias.float()


@torch.no_grad()
def tensors(net):
    out = {"model.embed_tokens.weight": net.embed.to(torch.bfloat16),
           "model.norm.weight": net.norm.to(torch.bfloat16),
           "lm_head.weight": net.head.to(torch.bfloat16)}
    for index in range(net.config["num_hidden_layers"]):
        layer_tensors(out, net, index)
    return {name: out[name].contiguous() for name in sorted(out)}


def write_json(path, value):
    with open(path, "w", newline="\n") as out:
        out.write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", help="training state; without it only the JSON files are written")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    write_json(os.path.join(args.out, "config.json"), config_json(tiny.CONFIG))
    write_json(os.path.join(args.out, "tokenizer_config.json"), tokenizer_config())
    write_json(os.path.join(args.out, "generation_config.json"),
               {"bos_token_id": bpe.RANKS, "eos_token_id": [bpe.EOS, bpe.IM_END], "pad_token_id": bpe.PAD,
                "do_sample": True, "temperature": 1.0, "top_p": 0.95})
    if args.state:
        net = tiny.TinyK2()
        net.load_state_dict(torch.load(args.state, map_location="cpu", weights_only=True)["net"])
        save_file(tensors(net), os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
