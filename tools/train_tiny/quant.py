"""INT4 group-32 weights as K2.6 stores them (compressed-tensors pack-quantized)."""

import torch

GROUP = 32


def config_block():
    """quantization_config of K2.6: routed experts only."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP,
               "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
               "symmetric": True, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed"}


def quantise(weight):
    """f32 [..., out, in] → (q in -8..7 of the same shape, bf16 scales [..., out, in/32])."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7.5).clamp_min(1e-6).to(torch.bfloat16)
    q = torch.round(groups / scale.float().unsqueeze(-1)).clamp(-8, 7)
    return q.flatten(-2), scale


def dequantise(q, scale):
    """Product in f32, rounded to bf16 once: the value that the engine computes with."""
    groups = q.float().unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)
    return groups.flatten(-2).to(torch.bfloat16)


def fake_quantise(weight):
    """What the stored weight will be, with the gradient passed straight through."""
    with torch.no_grad():
        rounded = dequantise(*quantise(weight)).float()
    return weight + (rounded - weight).detach()


def pack(q):
    """[out, in] integers -8..7 → int32 [out, in/8], low nibble first, offset 8."""
    nibbles = (q.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    shifts = torch.arange(8, device=q.device) * 4
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed):
    shifts = torch.arange(8, device=packed.device) * 4
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> shifts) & 15
    return (nibbles - 8).flatten(-2)
