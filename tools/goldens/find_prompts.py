"""Searches prompts whose routing and greedy continuation stay away from ties; writes prompts.json. See README.md.

usage: find_prompts.py [--out FILE] [--seconds N] [NAME ...]

Batched float32 transformers, on a GPU if there is one (about ten seconds a prompt; far slower without). Only ids come
out of it: make_goldens.py recomputes and checks everything on the CPU.
"""

import argparse
import json
import os
import time

import numpy as np
import torch

import stored_weights
import configs
import dummy_weights as dummy
import transformers_forward
from make_goldens import (GREEDY_LOGIT_GAP, GREEDY_MARGIN, GREEDY_TOKENS, PROMPT_MARGIN, PROMPT_TOKENS, STEADY,
                          steadiness)

BATCH = 64


class Searcher:
    def __init__(self, config, device):
        self.text, _ = configs.text_config(config)
        self.model = transformers_forward.load(self.text, stored_weights.dequantised(config)).to(device)
        self.softmax = self.text.get("scoring_func") == "softmax"
        self.device = device
        self.margins = []
        for module in self.model.modules():
            if type(module).__name__.endswith("TopkRouter"):
                module.register_forward_hook(self._note_margin)

    def _note_margin(self, router, inputs, output):
        """Appends the smallest distance between an expert or group taken and one left out, per token."""
        scores = output[0].softmax(-1) if self.softmax else output[0].sigmoid()
        choice = scores + getattr(router, "e_score_correction_bias", 0)
        margin = torch.full_like(choice[:, 0], torch.inf)
        if not self.softmax and router.num_group > 1:
            grouped = choice.view(len(choice), router.num_group, -1)
            totals = grouped.topk(2).values.sum(-1)
            best = totals.sort(descending=True)
            margin = best.values[:, router.topk_group - 1] - best.values[:, router.topk_group]
            kept = torch.zeros_like(totals).scatter_(1, best.indices[:, :router.topk_group], 1).bool()
            choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        best = choice.sort(descending=True).values
        self.margins.append(torch.minimum(margin, best[:, router.top_k - 1] - best[:, router.top_k]))

    @torch.no_grad()
    def forward(self, ids):
        """ids [B, T] to (logits of the last position [B, vocab], its routing margin [B])."""
        self.margins.clear()
        logits = self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        margin = torch.stack(self.margins).min(0).values.view(ids.shape)[:, -1]
        return logits, margin

    def extend(self, ids, candidates):
        """[B, T+1]: ids followed by each of the candidates."""
        head = torch.tensor(ids, device=self.device, dtype=torch.long).expand(len(candidates), -1)
        return torch.cat((head, torch.tensor(candidates, device=self.device)[:, None]), 1)

    def grow(self, ids, stream, length, margin):
        """ids extended to `length` with the first candidates of the stream that keep the margin."""
        while len(ids) < length:
            candidates = [next(stream) for _ in range(BATCH)]
            good = (self.forward(self.extend(ids, candidates))[1] >= margin).nonzero().flatten().tolist()
            if good:
                ids = ids + [candidates[good[0]]]
        return ids

    def finish(self, ids, margin):
        """Whole sequences [N, prompt + greedy] over all last prompt tokens that stay clear of ties."""
        rows = self.extend(ids, list(range(self.text["vocab_size"])))
        for step in range(GREEDY_TOKENS):
            logits, margins = self.forward(rows)
            best = logits.topk(2)
            clear = (best.values[:, 0] - best.values[:, 1] >= 1.05 * GREEDY_LOGIT_GAP)
            clear &= margins >= (1.05 * GREEDY_MARGIN if step else margin)
            rows = torch.cat((rows, best.indices[:, :1]), 1)[clear]
            if not len(rows):
                break
        return rows


def search(searcher, name, seconds):
    """(stream name, ids, steady greedy tokens) of the first wholly steady prompt, else of the steadiest one in time."""
    margin = 1.05 * PROMPT_MARGIN["softmax" if searcher.softmax else "sigmoid"]
    best, start, bump = (name, None, -1), time.time(), 0
    while time.time() - start < seconds:
        source = name if bump == 0 else "%s.%d" % (name, bump)
        bump += 1
        stream = iter((dummy.u64(source, 20000) % np.uint64(searcher.text["vocab_size"])).tolist())
        prefix = searcher.grow([], stream, PROMPT_TOKENS - 2, margin)
        if steadiness(searcher.model, torch.tensor(prefix, device=searcher.device))[0] > STEADY:
            continue
        for _ in range(12):
            for row in searcher.finish(searcher.grow(prefix, stream, PROMPT_TOKENS - 1, margin), margin):
                change, steady = steadiness(searcher.model, row)
                if change <= 0.9 * STEADY and steady > best[2]:
                    best = (source, row[:PROMPT_TOKENS].tolist(), steady)
                if best[2] == GREEDY_TOKENS:
                    return best
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--out", default=os.path.join(here, "prompts.json"))
    parser.add_argument("--seconds", type=float, default=600, help="after which the best prompt found is taken")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    if os.path.exists(options.out):
        with open(options.out) as stored:
            found = json.load(stored)
    for golden in options.names or configs.GOLDENS:
        searcher = Searcher(configs.GOLDENS[golden], device)
        found[golden] = []
        for name in ("prompt0", "prompt1"):
            start = time.time()
            source, ids, steady = search(searcher, name, options.seconds)
            print(golden, source, "steady", steady, "%.1f s" % (time.time() - start), flush=True)
            if ids is not None:
                found[golden].append({"name": source, "ids": ids})
        with open(options.out, "w") as out:
            lines = (" %s: [\n  %s\n ]" % (json.dumps(g), ",\n  ".join(map(json.dumps, p))) for g, p in found.items())
            out.write("{\n%s\n}\n" % ",\n".join(lines))


if __name__ == "__main__":
    main()
