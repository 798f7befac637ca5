"""The goldens' config.json files, in the key style of the hub's models, and the tensors each one implies."""

YARN_K26 = {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096}
YARN_V3 = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
           "original_max_position_embeddings": 4096}
YARN_V2_LITE = {**YARN_V3, "mscale": 0.707, "mscale_all_dim": 0.707}

FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4_EXPERTS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                    "dynamic": False, "actorder": None, "observer": "minmax"}}},
}

BASE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": YARN_K26, "max_position_embeddings": 262144,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}


def _k2(**changes):
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **BASE, **changes}


def _v3(**changes):
    v3 = {"rope_theta": 10000, "rope_scaling": YARN_V3, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
          "routed_scaling_factor": 2.5, "n_routed_experts": 32}
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **BASE, **v3, **changes}


def _v2_lite():
    return {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **BASE,
            "q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "n_shared_experts": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000,
            "rope_scaling": YARN_V2_LITE, "max_position_embeddings": 163840}


def _int4():
    text = _k2(quantization_config=INT4_EXPERTS)
    outer = {key: text[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", **outer,
            "text_config": text}


def _heads16():
    """Moonlight's layout. The norm eps is far larger than a real one, so that mistaking it for the latent eps shows."""
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **BASE,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_shared_experts": 2,
            "routed_scaling_factor": 2.446, "rope_scaling": None, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-3}


def _glm4_flash():
    config = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", **BASE,
              "num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 192, "v_head_dim": 256,
              "routed_scaling_factor": 1.8, "rope_theta": 1000000, "rope_scaling": None,
              "max_position_embeddings": 202752, "eos_token_id": [1, 2, 3]}
    del config["scoring_func"], config["moe_layer_freq"]
    return config


def _kimi_linear():
    renamed = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
               "n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize",
               "scoring_func": "moe_router_activation_func", "n_group": "num_expert_group",
               "max_position_embeddings": "model_max_length"}
    config = {renamed.get(key, key): value for key, value in BASE.items() if key != "topk_method"}
    return {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **config,
            "num_hidden_layers": 4, "head_dim": 64, "q_lora_rank": None, "mla_use_nope": True,
            "use_grouped_topk": True, "routed_scaling_factor": 2.446, "rope_theta": 10000.0, "rope_scaling": None,
            "model_max_length": 1048576,
            "pad_token_id": 511,
            "linear_attn_config": {"head_dim": 128, "num_heads": 2, "short_conv_kernel_size": 4,
                                   "kda_layers": [1, 2, 3], "full_attn_layers": [4]}}


GOLDENS = {
    "k2_yarn": _k2(),
    "v3_groups": _v3(n_group=8, topk_group=4, num_nextn_predict_layers=1),
    "v2_lite": _v2_lite(),
    "fp8_block": _v3(n_group=4, topk_group=2, quantization_config=FP8_BLOCK),
    "int4": _int4(),
    "heads16": _heads16(),
    "glm4_flash": _glm4_flash(),
    "kimi_linear": _kimi_linear(),
}


def text_config(config):
    """The language model's part of a config and the prefix of its tensor names."""
    if "text_config" in config:
        return config["text_config"], "language_model."
    return config, ""


def projections(config):
    """{name without prefix and suffix: [out, in]} of every linear layer of the decoder, routers left out."""
    c = config
    out = {}
    for layer in range(c["num_hidden_layers"]):
        base = "model.layers.%d." % layer
        kda = layer + 1 in c.get("linear_attn_config", {}).get("kda_layers", [])
        out.update((base + "self_attn." + k, v) for k, v in (_kda(c) if kda else _mla(c)).items())
        out.update((base + k, v) for k, v in _mlp(c, layer).items())
    return out


def _mla(c):
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank = c["q_lora_rank"]
    query = heads * (nope + rope)
    q = {"q_proj": (query, hidden)} if q_rank is None else {"q_a_proj": (q_rank, hidden), "q_b_proj": (query, q_rank)}
    return {**q, "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value)}


def _kda(c):
    hidden, dim, heads = c["hidden_size"], c["linear_attn_config"]["head_dim"], c["linear_attn_config"]["num_heads"]
    width = dim * heads
    return {"q_proj": (width, hidden), "k_proj": (width, hidden), "v_proj": (width, hidden),
            "f_a_proj": (dim, hidden), "f_b_proj": (width, dim), "b_proj": (heads, hidden),
            "g_a_proj": (dim, hidden), "g_b_proj": (width, dim), "o_proj": (hidden, width)}


def _gated_mlp(prefix, width, hidden, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {prefix + gate: (width, hidden), prefix + up: (width, hidden), prefix + down: (hidden, width)}


def _mlp(c, layer):
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    if layer < c["first_k_dense_replace"]:
        return _gated_mlp("mlp.", c["intermediate_size"], hidden)
    kimi_linear = c["model_type"] == "kimi_linear"
    block = "block_sparse_moe." if kimi_linear else "mlp."
    names = ("w1", "w3", "w2") if kimi_linear else ("gate_proj", "up_proj", "down_proj")
    shared = c["num_shared_experts" if kimi_linear else "n_shared_experts"]
    out = _gated_mlp(block + "shared_experts.", shared * width, hidden)
    for expert in range(c["num_experts" if kimi_linear else "n_routed_experts"]):
        out.update(_gated_mlp("%sexperts.%d." % (block, expert), width, hidden, names))
    return out


def other_tensors(config):
    """{name without prefix: (rule of dummy_weights, shape)} of everything that is never quantised."""
    c = config
    hidden = c["hidden_size"]
    out = {"model.embed_tokens.weight": ("weight", (c["vocab_size"], hidden)),
           "lm_head.weight": ("weight", (c["vocab_size"], hidden)), "model.norm.weight": ("norm", (hidden,))}
    for layer in range(c["num_hidden_layers"]):
        base = "model.layers.%d." % layer
        out[base + "input_layernorm.weight"] = ("norm", (hidden,))
        out[base + "post_attention_layernorm.weight"] = ("norm", (hidden,))
        out.update((base + "self_attn." + k, v) for k, v in _attention_extras(c, layer).items())
        if layer >= c["first_k_dense_replace"]:
            gate = base + ("block_sparse_moe.gate." if c["model_type"] == "kimi_linear" else "mlp.gate.")
            experts = c.get("num_experts", c.get("n_routed_experts"))
            out[gate + "weight"] = ("weight", (experts, hidden))
            if c.get("topk_method", "noaux_tc") == "noaux_tc":
                out[gate + "e_score_correction_bias"] = ("e_score_correction_bias", (experts,))
    return out


def _attention_extras(c, layer):
    linear = c.get("linear_attn_config", {})
    if layer + 1 in linear.get("kda_layers", []):
        dim, heads, kernel = linear["head_dim"], linear["num_heads"], linear["short_conv_kernel_size"]
        convolutions = {"%s_conv1d.weight" % x: ("weight", (heads * dim, 1, kernel)) for x in "qkv"}
        return {**convolutions, "A_log": ("A_log", (1, 1, heads, 1)), "dt_bias": ("dt_bias", (heads * dim,)),
                "o_norm.weight": ("norm", (dim,))}
    out = {"kv_a_layernorm.weight": ("norm", (c["kv_lora_rank"],))}
    if c["q_lora_rank"] is not None:
        out["q_a_layernorm.weight"] = ("norm", (c["q_lora_rank"],))
    return out
