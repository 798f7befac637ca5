"""The PyTorch reference of an exported tiny-kimi-linear against transformers' KimiLinearForCausalLM, in float32.

    python3 check_transformers.py --model ../../models/tiny-kimi-linear     (needs transformers 5.17)

Compares log-probabilities of evaluation prompts, and of the last tokens fed one by one through the caches.
"""

import argparse

import torch
import transformers

import bpe
import data
import reference
from eval import prompt_text

TOKENS = 150


def load_transformers(folder):
    """Every stored tensor must be taken, and none missed."""
    model, report = transformers.KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "kv_a_layernorm"):
            # transformers has 1e-6 here; the model is trained with rms_norm_eps.
            layer.self_attn.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
    return model.eval()


def float_reference(folder):
    net = reference.Reference(folder, "cpu")
    net.weights = {name: weight.float() for name, weight in net.weights.items()}
    net.experts = {layer: [w.float() for w in stacks] for layer, stacks in net.experts.items()}
    for attention in net.kda.values():
        attention.float()
    return net


@torch.no_grad()
def log_probabilities(net, ids):
    """[1, T]: prefill of the first two thirds, then decoding."""
    first = ids.shape[1] * 2 // 3
    x, caches = net.prefill(ids[:, :first], torch.tensor([first]), ids.shape[1])
    logits = [net.logits(x[0])]
    for at in range(first, ids.shape[1]):
        logits.append(net.decode(ids[:, at], torch.tensor([at]), caches))
    return torch.cat(logits).log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    judge, net = load_transformers(args.model), float_reference(args.model)
    tokenizer = bpe.Tokenizer(args.model + "/tiktoken.model")
    for name, records in data.eval_sets(True).items():
        ids = torch.tensor([tokenizer.encode(prompt_text(records[0]))[:TOKENS]])
        with torch.no_grad():
            theirs = judge(ids, use_cache=False).logits[0].log_softmax(-1)
        worst = (log_probabilities(net, ids) - theirs).abs().max().item()
        print("%-20s %3d tokens, largest difference of a log-probability %.1e" % (name, ids.shape[1], worst), flush=True)
        assert worst < 1e-3
    print("ok")


if __name__ == "__main__":
    main()
