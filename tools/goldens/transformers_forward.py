"""The same models run by transformers, loaded through its own weight loader from the hub tensor names."""

import json
import os
import tempfile

import torch
import transformers
from safetensors.torch import save_file

CLASSES = {"kimi_k2": ("DeepseekV3ForCausalLM", "deepseek_v3"), "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
           "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
           "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
           "kimi_linear": ("KimiLinearForCausalLM", "kimi_linear")}


def load(text_config, tensors):
    """A float32 eager transformers model. text_config: raw config; tensors: {hub name without prefix: f32 tensor}."""
    name, model_type = CLASSES[text_config["model_type"]]
    config = {key: value for key, value in text_config.items() if key not in ("quantization_config", "torch_dtype")}
    config.update(architectures=[name], model_type=model_type)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as out:
            json.dump(config, out)
        save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"),
                  metadata={"format": "pt"})
        model, report = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise ValueError("transformers did not take every tensor: %s" % problems)
    _check(model, text_config)
    return model.eval()


def _check(model, text_config):
    """Traps where transformers could quietly compute another model than the config says."""
    attention = next(a for a in (layer.self_attn for layer in model.model.layers) if hasattr(a, "kv_a_layernorm"))
    assert attention.kv_a_layernorm.variance_epsilon == 1e-6
    assert model.model.norm.variance_epsilon == text_config["rms_norm_eps"]
    if text_config["model_type"] == "deepseek_v2":
        assert abs(attention.scaling - 0.114721387) < 1e-8, attention.scaling
    if (text_config.get("rope_scaling") or {}).get("factor") == 64:
        assert abs(attention.scaling - 0.144679626) < 1e-8, attention.scaling
        sample = model.model.rotary_emb.inv_freq[12].item()
        assert abs(sample / 0.0116191599 - 1) < 1e-5, sample


@torch.no_grad()
def log_probabilities(model, ids):
    """ids [T] or [B, T] to float32 log-probabilities [..., T, vocab]."""
    tokens = torch.as_tensor(ids)
    logits = model(torch.atleast_2d(tokens), use_cache=False).logits
    return torch.log_softmax(logits, dim=-1).reshape(*tokens.shape, -1)


@torch.no_grad()
def noisy_log_probabilities(model, ids, copies, noise):
    """ids [T] to [copies, T, vocab]: every layer's and every norm's output is multiplied by 1 + noise * normal().

    Stands for the rounding of an engine that keeps activations in bf16: half a unit is 2^-9 at most, 2^-9/sqrt(3) in
    the mean square.
    """
    tokens = torch.as_tensor(ids)
    generator = torch.Generator(tokens.device).manual_seed(1)

    def disturb(module, inputs, output):
        return output * (1 + noise * torch.randn(output.shape, generator=generator, device=output.device))

    noisy = ("Linear", "RMSNorm", "RMSNormGated", "Experts", "DecoderLayer")
    disturbed = [module for module in model.modules() if type(module).__name__.endswith(noisy)]
    hooks = [module.register_forward_hook(disturb) for module in disturbed]
    try:
        return log_probabilities(model, tokens.repeat(copies, 1))
    finally:
        for hook in hooks:
            hook.remove()
