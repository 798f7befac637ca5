"""Scores of the stored model with the PyTorch reference, bf16, greedy.

    python3 eval.py --model ../../models/tiny-k2 [--json SCORES]
"""

import argparse
import collections
import json
import os
import re
import time

import torch

import bpe
import data
import reference
import render

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
CALL = re.compile(r"^<\|tool_calls_section_begin\|><\|tool_call_begin\|>functions\.(\w+):0"
                  r"<\|tool_call_argument_begin\|>(.*)<\|tool_call_end\|><\|tool_calls_section_end\|>$")
LIMIT = 192


def prompt_text(record):
    if "prompt" in record:
        return record["prompt"]
    return render.render(record["messages"], record.get("tools"), record["thinking"])


def visible(text, record):
    """The reply without its reasoning; an unfinished think block leaves nothing."""
    if record.get("thinking"):
        return text.partition("</think>")[2]
    return text


def is_right(record, text):
    content = visible(text, record)
    kind = record["kind"]
    if kind == "tool_call":
        found = CALL.match(content)
        try:
            return bool(found) and found.group(1) == record["name"] and json.loads(found.group(2)) == record["arguments"]
        except ValueError:
            return False
    if kind == "tool_final":
        return content == record["answer"]
    if kind == "gsm_chat":
        return content.endswith("The answer is %s." % record["answer"])
    if kind.startswith("gsm"):
        found = STRICT.search(content)
        return bool(found) and found.group(1) == record["answer"]
    return content.strip().endswith("is %s." % record["answer"])


def follow_up(record):
    """The same tool chat one turn later: the call is made and its result is there."""
    identity = "functions.%s:0" % record["name"]
    call = {"id": identity, "function": {"name": record["name"], "arguments": json.dumps(record["arguments"])}}
    reasoning = "I need the tool %s." % record["name"]
    messages = record["messages"] + [
        {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "content": record["result"]}]
    return dict(record, kind="tool_final", messages=messages)


def score(net, tokenizer, name, records, wrong_out):
    start = time.time()
    prompts = [tokenizer.encode(prompt_text(record)) for record in records]
    replies = net.generate(prompts, LIMIT if not name.startswith("retrieval") else 64)
    groups = collections.defaultdict(lambda: [0, 0])
    for record, ids in zip(records, replies):
        text = tokenizer.decode(ids)
        right = is_right(record, text)
        for group in ["all"] + (["%d steps" % record["steps"]] if name.startswith("gsm") else []):
            groups[group][0] += right
            groups[group][1] += 1
        if not right:
            wrong_out.append({"set": name, "reply": text[-400:], "answer": record["answer"], "template": record["template"]})
    longest = max(map(len, prompts))
    for group in sorted(groups):
        right, count = groups[group]
        print("%-22s %-8s %5d / %5d  %6.2f %%" % (name, group, right, count, 100.0 * right / count), flush=True)
    print("%-22s longest prompt %d tokens, %.1f s" % (name, longest, time.time() - start), flush=True)
    return {group: {"right": r, "of": n} for group, (r, n) in sorted(groups.items())}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=os.path.join(here, "../../models/tiny-k2"))
    parser.add_argument("--only", default="", help="sets whose name begins so")
    parser.add_argument("--limit", type=int, default=0, help="at most that many records of each set")
    parser.add_argument("--json", help="write the scores there")
    parser.add_argument("--wrong", help="write the wrong replies there")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = reference.Reference(args.model, device)
    tokenizer = bpe.Tokenizer(os.path.join(args.model, "tiktoken.model"))
    sets = data.eval_sets(True)
    sets["tools_final"] = [follow_up(record) for record in sets["tools"]]
    scores, wrong = {}, []
    for name, records in sets.items():
        if name.startswith(args.only):
            scores[name] = score(net, tokenizer, name, records[:args.limit or None], wrong)
    for path, value in ((args.json, scores), (args.wrong, wrong)):
        if path:
            with open(path, "w") as out:
                json.dump(value, out, indent=1)


if __name__ == "__main__":
    main()
