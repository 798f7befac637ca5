#!/usr/bin/env python3
"""Scores a served bundled model on the held-out task sets and compares with the PyTorch reference (the model card).

    tools/score.py --program build/perigee [--model models/tiny-kimi-linear] [--only gsm_5shot_a,tools] [--limit N] [--concurrency 16]
    tools/score.py --program build/perigee --only gsm_5shot_a --limit 100 --table    accuracy by tp, dcp and cache
    tools/score.py --program build/perigee --prefill=-tp=2 --decode=-tp=4            of two servers, behind the router
    tools/score.py --program build/perigee --only gsm_5shot_a --limit 100 --pairs    accuracy of pairs by both layouts and cache
    tools/score.py --program build/perigee --limit 40 --draft models/tiny-k2-eagle3  accepted drafts by set, place and dcp

Sets whose prompts are stored as seeds are written to a scratch folder first. Exits non-zero when a share is more than
one point from the reference's; with --table from that of one rank with a bf16 cache, with --pairs from that of one server
with the same cache; with --draft when rows keep fewer than 2.5 tokens on average over all sets, or where ranks share the cache
drafts are accepted half a point less or more often at a place than on one rank. Standard library only.
"""
import argparse
import concurrent.futures
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from server_process import TOP, PairProcess, ServerProcess

ALWAYS_RIGHT = dict.fromkeys(
    ["gsm_chat", "tool_call", "tool_answer", "retrieval_1024", "retrieval_4096", "retrieval_16384"], 100.0)
# Reference scores in percent by model folder: the model cards (PyTorch, bf16, greedy).
REFERENCE = {
    "tiny-k2": {**ALWAYS_RIGHT, "gsm_5shot": 99.70, "gsm_0shot": 99.51, "gsm_0shot_held_out": 19.5,
                "gsm_5shot_held_out": 6.5},
    "tiny-kimi-linear": {**ALWAYS_RIGHT, "gsm_5shot": 99.60, "gsm_0shot": 99.60, "gsm_0shot_held_out": 9.75,
                         "gsm_5shot_held_out": 13.0},
}
# Held-out wordings are noise at these sizes: reported, not judged.
REPORTED_ONLY = {"gsm_0shot_held_out", "gsm_5shot_held_out"}


# Of --table: (tp, dcp), each with every cache.
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 4)]
CACHES = ["bf16", "fp8", "fp8_ds_mla"]

# Of --draft.
NUM_DRAFTS, LEAST_LENGTH, MOST_APART = 3, 2.5, 0.005
DRAFT_LAYOUTS = [(1, 1), (2, 2)]


def load(folder, only, limit):
    rows = []
    for name in sorted(os.listdir(folder)):
        stem, _, kind = name.partition(".")
        if kind not in ("jsonl", "jsonl.gz") or (only and stem not in only):
            continue
        with (gzip.open if kind == "jsonl.gz" else open)(os.path.join(folder, name), "rt", encoding="utf-8") as file:
            kept = [json.loads(line) for line in file]
        rows += kept[:limit] if limit else kept
    return rows


def max_tokens(row):
    """Retrieval prompts leave little room under the model's 16,384 positions."""
    return 32 if row["kind"].startswith("retrieval") else 400


FAILURES = []  # replies that were errors; they count as wrong


def failed(status, reply):
    FAILURES.append(f"HTTP {status}: {reply}")
    return FAILURES[-1]


def ask_text(server, row):
    status, reply = server.post("/v1/completions", {
        "model": server.model, "prompt": row["prompt"], "temperature": 0, "max_tokens": max_tokens(row), "stop": ["Question:"]}, 600)
    if status != 200:
        return failed(status, reply)
    return reply["choices"][0]["text"]


def ask_chat(server, messages, row):
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens(row),
            "chat_template_kwargs": {"thinking": row.get("thinking", True)}}
    if row.get("tools"):
        body["tools"] = row["tools"]
    status, reply = server.post("/v1/chat/completions", body, 600)
    if status != 200:
        return {"content": failed(status, reply)}
    return reply["choices"][0]["message"]


def last_number(text):
    numbers = re.findall(r"-?\d+", text or "")
    return numbers[-1] if numbers else None


def score_tool(server, row):
    message = ask_chat(server, row["messages"], row)
    calls = message.get("tool_calls") or []
    right = False
    if len(calls) == 1 and calls[0]["function"]["name"] == row["name"]:
        try:
            right = json.loads(calls[0]["function"]["arguments"]) == row["arguments"]
        except ValueError:
            right = False
    if not right:
        return [("tool_call", False), ("tool_answer", False)]
    history = row["messages"] + [message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": row["result"]}]
    final = ask_chat(server, history, row)
    return [("tool_call", True), ("tool_answer", (final.get("content") or "").strip() == row["answer"])]


def score_row(server, row):
    kind = row["kind"]
    if kind == "tool_call":
        return score_tool(server, row)
    text = ask_chat(server, row["messages"], row).get("content") if "messages" in row else ask_text(server, row)
    if kind.startswith("gsm") and "prompt" in row:
        found = re.findall(r"#### (-?\d+)", text or "")
        return [(kind, bool(found) and found[-1] == row["answer"])]
    if kind.startswith("gsm"):
        return [(kind, last_number(text) == row["answer"])]
    return [(kind, row["answer"] in (text or ""))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", default=f"{TOP}/models/tiny-k2")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--prefill", help="further flags of a server that computes prompts, with --decode")
    parser.add_argument("--decode", help="further flags of the server that computes their replies")
    parser.add_argument("--draft", help="CPU ranks: a draft's folder: accepted drafts by set and place, by tp and dcp")
    parser.add_argument("--table", action="store_true", help="CPU ranks: accuracy by tp, dcp and cache, of all sets together")
    parser.add_argument("--pairs", action="store_true", help="the same of all pairs of a prefill and a decode server, after one server")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, f"{TOP}/tools/train_tiny/data.py", "--make-eval", scratch, "--full-text"],
                       check=True, stdout=subprocess.DEVNULL)
        rows = load(scratch, only, arguments.limit)
    if arguments.draft:
        return acceptance(arguments, [row for row in rows if row["kind"] not in REPORTED_ONLY])
    if arguments.table:
        return table(arguments, rows)
    if arguments.pairs:
        return pairs(arguments, rows)
    roles = arguments.prefill, arguments.decode
    of_pair = None if roles == (None, None) else [(flags or "").split() for flags in roles]
    totals = ask_all(arguments, rows, [], of_pair)
    return report(totals, REFERENCE[os.path.basename(os.path.normpath(arguments.model))])


def layout_flags(tp, dcp):
    return [f"--tensor-parallel-size={tp}", f"--decode-context-parallel-size={dcp}"]


def judged(totals):
    """-> right, asked of the sets that are judged."""
    return [sum(counts[i] for kind, counts in totals.items() if kind not in REPORTED_ONLY) for i in (0, 1)]


def by_set(totals):
    return [f"{right}/{total}" for kind, (right, total) in sorted(totals.items()) if kind not in REPORTED_ONLY]


def pairs(arguments, rows):
    """Each line is compared with one server of one rank with the same cache."""
    any_off, header = False, None
    for cache in CACHES:
        common = ["--device", "cpu", "--kv-cache-dtype", cache]
        one = None
        for layouts in [None, *itertools.product(LAYOUTS, LAYOUTS)]:
            totals = ask_all(arguments, rows, common, layouts and [layout_flags(*layout) for layout in layouts])
            if header is None:
                header = [kind for kind in sorted(totals) if kind not in REPORTED_ONLY]
                print("| cache | prefill tp, dcp | decode tp, dcp | " + " | ".join(header) + " | right | share |")
                print("|---|---|---|" + "---|" * len(header) + "---|---|")
            right, total = judged(totals)
            share = 100.0 * right / total
            one = share if one is None else one
            any_off |= abs(share - one) > 1.0 or bool(FAILURES)
            names = [f"{tp}, {dcp}" for tp, dcp in layouts] if layouts else ["one server", ""]
            print("| " + " | ".join([cache, *names, *by_set(totals), f"{right}/{total}", f"{share:.2f} %"]) + " |", flush=True)
    return 1 if any_off else 0


def table(arguments, rows):
    print("| tp | dcp | cache | right | share |\n|---|---|---|---|---|")
    one_rank, failed = None, False
    for tp, dcp in LAYOUTS:
        for cache in CACHES:
            flags = ["--device", "cpu", *layout_flags(tp, dcp), "--kv-cache-dtype", cache]
            totals = ask_all(arguments, rows, flags)
            right, total = judged(totals)
            share = 100.0 * right / total
            one_rank = share if one_rank is None else one_rank
            failed |= abs(share - one_rank) > 1.0
            print(f"| {tp} | {dcp} | {cache} | {right}/{total} | {share:.2f} % |", flush=True)
    return 1 if failed else 0


def verified(server):
    """-> how many rows have verified drafts, and at how many of them the draft of each place was accepted."""
    text = server.get("/metrics")[1].decode()

    def total(name, labels=""):
        found = re.findall(rf"^vllm:spec_decode_{name}_total\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    return [total("num_drafts"), *(total("num_accepted_tokens_per_pos", f'position="{i}"') for i in range(NUM_DRAFTS))]


def acceptance(arguments, rows):
    """Sets one after the other; of greedy replies."""
    by_set = {kind: [row for row in rows if row["kind"] == kind] for kind in sorted({row["kind"] for row in rows})}
    speculation = {"method": "eagle3", "model": arguments.draft, "num_speculative_tokens": NUM_DRAFTS}
    places = range(1, NUM_DRAFTS + 1)
    print("| tp | dcp | set | rows | " + " | ".join(f"place {i}" for i in places) + " | mean length |")
    print("|---|---|---|---|" + "---|" * NUM_DRAFTS + "---|")
    one_rank, failed = None, False

    def line(tp, dcp, name, counts):
        shares = [accepted / counts[0] for accepted in counts[1:]]
        print(f"| {tp} | {dcp} | {name} | {counts[0]:.0f} | " + " | ".join(f"{100 * share:.1f} %" for share in shares)
              + f" | {1 + sum(shares):.2f} |", flush=True)
        return shares

    for tp, dcp in DRAFT_LAYOUTS:
        flags = ["--device", "cpu", *layout_flags(tp, dcp), "--speculative-config", json.dumps(speculation)]
        sums = [0] * (1 + NUM_DRAFTS)
        with ServerProcess(arguments.program, arguments.model, [*flags, *arguments.flags.split()]) as server, \
                concurrent.futures.ThreadPoolExecutor(arguments.concurrency) as pool:
            for kind, of_set in by_set.items():
                before = verified(server)
                list(pool.map(lambda row: score_row(server, row), of_set))
                counts = [after - was for after, was in zip(verified(server), before)]
                sums = [a + b for a, b in zip(sums, counts)]
                line(tp, dcp, kind, counts)
        shares = line(tp, dcp, "all", sums)
        one_rank = one_rank or shares
        failed |= 1 + sum(shares) < LEAST_LENGTH
        failed |= any(abs(a - b) > MOST_APART for a, b in zip(shares, one_rank)) or bool(FAILURES)
    return 1 if failed else 0


def ask_all(arguments, rows, flags, of_pair=None):
    """-> [right, asked] by kind. `of_pair`: further flags of a prefill and of a decode server, in place of one server."""
    totals, begin, done = {}, time.monotonic(), 0
    FAILURES.clear()
    flags = [*flags, *arguments.flags.split()]
    if of_pair:
        process = PairProcess(arguments.program, arguments.model, flags, *of_pair)
    else:
        process = ServerProcess(arguments.program, arguments.model, flags)
    with process as server, \
            concurrent.futures.ThreadPoolExecutor(arguments.concurrency) as pool:
        for outcome in pool.map(lambda row: score_row(server, row), rows):
            for kind, right in outcome:
                counts = totals.setdefault(kind, [0, 0])
                counts[0] += right
                counts[1] += 1
            done += 1
            if done % 200 == 0:
                rate = done / (time.monotonic() - begin)
                print(f"  {done} of {len(rows)}, {rate:.1f} a second, {(len(rows) - done) / rate:.0f} s left", file=sys.stderr)
    if FAILURES:
        print(f"{len(FAILURES)} requests failed; the first: {FAILURES[0]}", file=sys.stderr)
    return totals


def report(totals, references):
    failed = False
    print("| set | right | share | reference | difference |\n|---|---|---|---|---|")
    for kind, (right, total) in sorted(totals.items()):
        share = 100.0 * right / total
        reference = references[kind]
        off = abs(share - reference) > 1.0
        judged = kind not in REPORTED_ONLY
        failed |= off and judged
        note = "" if judged else " (reported only)"
        print(f"| {kind} | {right}/{total} | {share:.2f} % | {reference:.2f} % | {share - reference:+.2f}{note} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
