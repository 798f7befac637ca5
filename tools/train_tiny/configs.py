"""The bundled models' configurations, and the hub's config.json for them.

Code here and in the trainer uses DeepSeek's key names for both models; Kimi-Linear's config.json spells some of them
differently (RENAMED).
"""

import bpe
import quant

SHARED = {
    "vocab_size": 2304, "num_attention_heads": 8, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
}
CONFIGS = {
    "tiny-k2": {
        **SHARED, "hidden_size": 256, "num_hidden_layers": 4, "q_lora_rank": 128, "intermediate_size": 512,
        "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                         "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "tiny-kimi-linear": {
        **SHARED, "hidden_size": 192, "num_hidden_layers": 6, "q_lora_rank": None, "intermediate_size": 512,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.446, "rope_theta": 10000.0, "rope_scaling": None, "mla_use_nope": True,
        # Layers are counted from 1, as on the hub.
        "linear_attn_config": {"head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4,
                               "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6]},
    },
}
RENAMED = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
           "n_shared_experts": "num_shared_experts", "max_position_embeddings": "model_max_length"}


def is_kimi_linear(config):
    return "linear_attn_config" in config


def is_kda(config, index):
    """Whether layer `index`, counted from 0, has delta attention."""
    return is_kimi_linear(config) and index + 1 in config["linear_attn_config"]["kda_layers"]


def to_hub(config):
    """The whole config.json of the exported model."""
    out = dict(config)
    out.update({
        "bos_token_id": bpe.RANKS, "eos_token_id": bpe.IM_END, "pad_token_id": bpe.PAD, "dtype": "bfloat16",
        "hidden_act": "silu", "initializer_range": 0.02, "moe_layer_freq": 1, "topk_group": 1,
        "num_key_value_heads": config["num_attention_heads"], "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False, "use_cache": True})
    if is_kimi_linear(config):
        out.update({
            "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
            "head_dim": config["hidden_size"] // config["num_attention_heads"], "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "use_grouped_topk": True})
        return {RENAMED.get(key, key): value for key, value in out.items()}
    out.update({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "n_group": 1, "norm_topk_prob": True,
        "pretraining_tp": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True,
        "quantization_config": quant.config_block()})
    return out


def from_hub(stored):
    """The same with DeepSeek's key names."""
    back = {theirs: mine for mine, theirs in RENAMED.items()} if is_kimi_linear(stored) else {}
    return {back.get(key, key): value for key, value in stored.items()}
