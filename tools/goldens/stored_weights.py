"""The goldens' weights in memory: stored tensors under their hub names, and the float32 values they stand for."""

import configs
import dummy_weights as dummy


def stored_tensors(config):
    """{full hub name: torch tensor} as the model's files would hold them."""
    return {name: dummy.stored(name, shape, kind) for name, (kind, shape) in tensor_table(config).items()}


def tensor_table(config):
    """{full hub name: (rule of dummy_weights, shape handed to the rule)}."""
    text, prefix = configs.text_config(config)
    table = {prefix + name: rule for name, rule in configs.other_tensors(text).items()}
    for name, shape in configs.projections(text).items():
        for suffix, kind in _storage(text, name):
            table[prefix + name + suffix] = (kind, shape)
    return table


def _storage(text, projection):
    method = text.get("quantization_config", {}).get("quant_method")
    if method == "fp8":
        return (".weight", "fp8"), (".weight_scale_inv", "fp8_scale_inv")
    if method == "compressed-tensors" and ".mlp.experts." in projection:
        return (".weight_packed", "int4_packed"), (".weight_scale", "int4_scale"), (".weight_shape", "int4_shape")
    return ((".weight", "weight"),)


def dequantised(config):
    """{hub name without prefix: float32 tensor}: every tensor that float files of the same model would hold."""
    text, prefix = configs.text_config(config)
    raw = {name.removeprefix(prefix): tensor for name, tensor in stored_tensors(config).items()}
    out = {}
    for name, tensor in raw.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            out[base] = dummy.dequantise_int4(tensor, raw[base + "_scale"])
        elif name + "_scale_inv" in raw:
            out[name] = dummy.dequantise_fp8(tensor, raw[name + "_scale_inv"])
        elif not name.endswith(("_scale", "_shape", "_scale_inv")):
            out[name] = tensor.float()
    return out
