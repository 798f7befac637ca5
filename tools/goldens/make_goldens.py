"""Writes tests/golden/NAME/{config.json, expected.json} and tests/golden/dummy_weights.json. See README.md.

usage: make_goldens.py [--out FOLDER] [--check] [NAME ...]
--check compares with what is stored instead of writing.
"""

import argparse
import json
import os
import sys
import zlib

import numpy as np
import torch
import transformers

import stored_weights
import configs
import dummy_weights as dummy
import reference_forward
import transformers_forward

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT_TOKENS, GREEDY_TOKENS, TOP = 48, 16, 20
LATENT_NORM_EPS = 1e-6
# Smallest accepted distance between the last expert (or expert group) taken and the first left out. Softmax scores of
# 16 experts lie closer together than sigmoid scores.
PROMPT_MARGIN = {"sigmoid": 0.02, "softmax": 0.006}
GREEDY_MARGIN, GREEDY_LOGIT_GAP = 0.002, 0.08
# Under noise of bf16's size no leading log-probability at a prompt position may move further than STEADY: a changed
# expert moves one by about 1.
NOISE, NOISY_COPIES, STEADY = 2.0**-9, 32, 0.3
LARGEST_DIFFERENCE = 1e-4


class Model:
    """One golden's model under both implementations."""

    def __init__(self, config):
        self.text, _ = configs.text_config(config)
        tensors = stored_weights.dequantised(config)
        self.judge = transformers_forward.load(self.text, tensors)
        self.doubles = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self.prompt_margin = PROMPT_MARGIN["softmax" if self.text.get("scoring_func") == "softmax" else "sigmoid"]

    def reference(self, ids):
        return reference_forward.log_probabilities(self.text, self.doubles, ids, LATENT_NORM_EPS)


def steadiness(judge, ids):
    """ids = prompt, or prompt and greedy continuation, under noise of bf16's size. Returns (largest change of a leading
    log-probability at a prompt position, number of leading greedy tokens that stay the choice in every draw).
    """
    clean = transformers_forward.log_probabilities(judge, ids)
    noisy = transformers_forward.noisy_log_probabilities(judge, ids, NOISY_COPIES, NOISE)
    top = clean.topk(TOP).indices.expand(NOISY_COPIES, -1, -1)
    change = (noisy.gather(-1, top) - clean.gather(-1, top[0])).abs().amax(dim=(0, 2))
    same = (noisy.argmax(-1) == clean.argmax(-1)).all(0) & (change <= STEADY)
    greedy = same[PROMPT_TOKENS - 1:len(ids) - 1].tolist()
    return change[:PROMPT_TOKENS].max().item(), (greedy + [False]).index(False)


def continue_greedily(model, prompt):
    """{ids, logprobs, router_margin, logit_gap} of the greedy continuation, None if it comes too close to a tie."""
    ids, gaps = list(prompt), []
    while len(ids) < len(prompt) + GREEDY_TOKENS:
        logprobs, margin = model.reference(ids)
        best = np.argsort(-logprobs[-1], kind="stable")[:2]
        gaps.append(logprobs[-1, best[0]] - logprobs[-1, best[1]])
        if gaps[-1] < GREEDY_LOGIT_GAP or margin[len(prompt):].min(initial=1) < GREEDY_MARGIN:
            return None
        ids.append(int(best[0]))
    # The last id is never fed back, so its own routing does not count.
    return {"ids": ids[len(prompt):], "router_margin": margin[len(prompt):].min(), "logit_gap": min(gaps)}


def judged_prompt(model, source, ids):
    """One entry of expected.json's `prompts`, values from transformers, checked against the reference."""
    greedy = continue_greedily(model, ids)
    assert greedy, "prompt %s comes too close to a tie" % source
    whole = ids + greedy["ids"]
    judged = transformers_forward.log_probabilities(model.judge, whole).numpy()
    reference, margin = model.reference(whole)
    difference = np.abs(judged - reference).max()
    assert difference < LARGEST_DIFFERENCE, (source, difference)
    judged_greedy = judged[len(ids) - 1:-1].argmax(-1).tolist()
    assert judged_greedy == greedy["ids"], (source, judged_greedy, greedy["ids"])
    change, steady = steadiness(model.judge, torch.tensor(whole))
    assert change <= STEADY, (source, change)
    assert margin[:len(ids)].min() >= model.prompt_margin, (source, margin[:len(ids)].min())
    top = np.argsort(-judged[:len(ids)], axis=-1, kind="stable")[:, :TOP]
    positions = [{"top": [[int(i), round(float(judged[p, i]), 6)] for i in row]} for p, row in enumerate(top)]
    chosen = [round(float(judged[len(ids) - 1 + step, token]), 6) for step, token in enumerate(greedy["ids"])]
    return {"name": source, "ids": ids, "greedy_next": greedy["ids"], "greedy_logprobs": chosen,
            "greedy_steady": steady,
            "min_router_margin_prompt": _short(margin[:len(ids)].min()),
            "min_router_margin_greedy": _short(greedy["router_margin"]),
            "min_logit_gap_greedy": _short(greedy["logit_gap"]),
            "max_change_under_noise": _short(change),
            "max_difference_to_reference": _short(difference), "positions": positions}


def _short(value):
    return float("%.3g" % value)


def expected(config, prompts):
    """Contents of expected.json. prompts: [{name, ids}]."""
    model = Model(config)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__,
                "class": type(model.judge).__name__, "device": "cpu", "dtype": "float32"}
    return {"versions": versions, "latent_norm_eps": LATENT_NORM_EPS,
            "prompts": [judged_prompt(model, prompt["name"], prompt["ids"]) for prompt in prompts]}


def unit_vectors():
    """One tensor of every rule: its first values and checksums of its first 1024 stored bytes (little-endian)."""
    wanted = [("k2_yarn", "lm_head.weight"), ("k2_yarn", "model.layers.1.mlp.gate.weight"),
              ("k2_yarn", "model.layers.0.self_attn.kv_a_layernorm.weight"),
              ("k2_yarn", "model.layers.1.mlp.gate.e_score_correction_bias"),
              ("int4", "language_model.model.layers.1.mlp.experts.3.down_proj.weight_packed"),
              ("int4", "language_model.model.layers.1.mlp.experts.3.down_proj.weight_scale"),
              ("int4", "language_model.model.layers.1.mlp.experts.3.down_proj.weight_shape"),
              ("fp8_block", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
              ("fp8_block", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"),
              ("kimi_linear", "model.layers.0.self_attn.q_conv1d.weight"),
              ("kimi_linear", "model.layers.0.self_attn.A_log"), ("kimi_linear", "model.layers.0.self_attn.dt_bias")]
    return {"u64": [{"name": "prompt0", "fnv1a64": "%016x" % dummy.fnv1a64(b"prompt0"),
                     "first": ["%016x" % value for value in dummy.u64("prompt0", 4).tolist()]}],
            "tensors": [_unit_vector(golden, name) for golden, name in wanted]}


def _unit_vector(golden, name):
    rule, shape = stored_weights.tensor_table(configs.GOLDENS[golden])[name]
    tensor = dummy.stored(name, shape, rule)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()[:1024]
    values = tensor.reshape(-1)[:8]
    return {"name": name, "rule": rule, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "first": [v.item() for v in (values if rule in ("int4_packed", "int4_shape") else values.float())],
            "bytes": len(data), "crc32": "%08x" % zlib.crc32(data), "fnv1a64": "%016x" % dummy.fnv1a64(data)}


def render(value, indent=0):
    """JSON with one line per position, prompt field or unit vector: diffs stay readable and files small."""
    pad = " " * indent
    if isinstance(value, dict) and indent < 3 and "top" not in value:
        lines = ("%s %s: %s" % (pad, json.dumps(k), render(v, indent + 1)) for k, v in value.items())
        return "{\n%s\n%s}" % (",\n".join(lines), pad)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n%s\n%s]" % (",\n".join(pad + " " + render(v, indent + 1) for v in value), pad)
    return json.dumps(value, separators=(",", ":"))


def same(new, old):
    """Equal up to float noise; margins and differences to the reference are informative only."""
    if isinstance(new, dict):
        return new.keys() == old.keys() and all(same(v, old[k]) for k, v in new.items() if not
                                                k.startswith(("versions", "greedy_steady", "min_", "max_")))
    if isinstance(new, list):
        return len(new) == len(old) and all(map(same, new, old))
    return abs(new - old) < 2e-5 if isinstance(new, float) else new == old


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "..", "tests", "golden"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", choices=[[], *configs.GOLDENS], default=[])
    options = parser.parse_args()
    bad = []
    for name in ["", *(options.names or configs.GOLDENS)]:
        made = make(name, options)
        for path, value in made.items():
            if options.check and not same(value, read(options.out, path)):
                bad.append(path)
            elif not options.check:
                write(options.out, path, value)
        report(name, made)
    if bad:
        sys.exit("differs: " + " ".join(bad))


def make(name, options):
    """{path: contents} of one golden; of the file of unit vectors if the name is empty."""
    if not name:
        return {"dummy_weights.json": unit_vectors()}
    config, path = configs.GOLDENS[name], name + "/expected.json"
    return {name + "/config.json": config, path: expected(config, read(HERE, "prompts.json")[name])}


def read(folder, path):
    with open(os.path.join(folder, path)) as stored:
        return json.load(stored)


def write(folder, path, value):
    path = os.path.join(folder, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as out:
        out.write((json.dumps(value, indent=1) if path.endswith("config.json") else render(value)) + "\n")


def report(name, made):
    for prompt in made.get(name + "/expected.json", {}).get("prompts", []):
        figures = {key: value for key, value in prompt.items() if key.startswith(("min_", "max_", "greedy_s"))}
        print(name, prompt["name"], figures, flush=True)


if __name__ == "__main__":
    main()
