#!/usr/bin/env python3
"""What speculation gives on one GPU, beside the bars for an H200: tools/draft_bench.py [--build build] [--results FOLDER].

A decode step of Kimi-Linear-48B with made-up weights, one sequence of 1,024 tokens, without drafts and with three, of which
rows keep 2.55 tokens (`synthetic`): tokens a second, what the trace without drafts lets one expect, and the time in which
nothing runs; the speed-up by a draft of Llama's kind, too. Then what drafts add to a server's start, and the GPU's memory
beside what `perigee plan` says. Then latent attention of verify rows. A bar counts as met
within 3 %. Takes about five minutes. Needs libcupti.so.13 on LD_LIBRARY_PATH for the traces. --flags are those of
`perigee bench step`, to try it on a CPU.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time

from group_bench import STEP, TOP, met, verdict
from server_process import ServerProcess

MODEL, DRAFT = "bench/models/kimi-linear-48b", "bench/models/kimi-linear-48b-eagle3-mla"
LLAMA_DRAFT = "bench/models/kimi-linear-48b-eagle3"
FLAGS = [*STEP, "--kv-cache-memory-bytes", "12G"]
SHAPE = ["--batch", "1", "--context", "1024", "--steps", "400", "--warm-steps", "20"]
SPEED_UP, OF_PREDICTED, GAPS_US = 1.2, 0.9, 25
MORE_START_S, PLAN_OFF = 10, 0.03
ATTENTION = {"fp8 h64 B8 S16384 q4": 130, "bf16 h64 B8 S16384 q4": 130, "bf16 h128 B64 S4096 q1": 125}  # rows: us


def by_op(table):
    return {group["op"]: group for group in table}


def predicted_us(plain, drafting):
    """What the drafting step would take if each op read its bytes as fast as in the plain step, and no faster than that
    step took; ops that only drafts have as they were measured. Both: the table of `bench step --save-result`."""
    plain, total = by_op(plain), 0.0
    for op, group in by_op(drafting).items():
        before = plain.get(op)
        if before is None or before["bytes"] == 0:
            total += group["us"] if before is None else before["us"]
            continue
        total += before["us"] * max(1.0, group["bytes"] / before["bytes"])
    return total


def gaps_us(table):
    return sum(group["us"] for group in table if group["op"] == "gaps")


def speculation(draft, num_drafts, **more):
    return ["--speculative-config", json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": num_drafts, **more})]


def planned_bytes(plan):
    """Of `perigee plan --json`: all that a GPU's rank takes."""
    workspace = sum(size for name, size in plan["workspace"].items() if name.endswith("_bytes"))
    return plan["weight_bytes"] + workspace + plan["graph_bytes"] + plan["pool_bytes"]


def used_mib():
    told = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                          text=True, check=True)
    return float(told.stdout.split()[0])


class Bench:
    def __init__(self, arguments):
        self.args = arguments
        self.missed = 0
        os.makedirs(arguments.results, exist_ok=True)

    def say(self, name, figure, unit, bar=None, most=False):
        self.missed += bar is not None and not met(figure, bar, most)
        print(f"{name:<52} {figure:10,.2f} {unit}{verdict(figure, bar, most)}", flush=True)

    def step(self, name, *words):
        file = f"{self.args.results}/draft_{name}.json"
        command = [f"{self.args.build}/perigee", "bench", "step", self.args.model, *self.args.flags, *SHAPE, "--trace", *words,
                   "--save-result", file]
        print("$", shlex.join(command), flush=True)
        with open(f"{self.args.results}/draft_{name}.txt", "w", encoding="utf-8") as log:
            subprocess.run(command, cwd=TOP, stdout=log, check=True, timeout=400)
        with open(file, encoding="utf-8") as found:
            return json.load(found)

    def drafting(self, name, draft):
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.35]}
        return self.step(name, *speculation(draft, 3, **synthetic))

    def steps(self):
        plain, drafting = self.step("without"), self.drafting("with", self.args.draft)
        kept = drafting["tokens_per_row"]
        speed_up = drafting["tokens_per_s"] / plain["tokens_per_s"]
        expected = kept * plain["median_us"] / predicted_us(plain["table"], drafting["table"])
        self.say("without drafts", plain["tokens_per_s"], "tok/s")
        self.say("with three", drafting["tokens_per_s"], "tok/s")
        self.say("tokens kept of a row", kept, "")
        self.say("speed-up", speed_up, "", SPEED_UP)
        self.say("of what the trace predicts", speed_up / expected, "", OF_PREDICTED)
        self.say("nothing runs", gaps_us(drafting["table"]), "us", GAPS_US, most=True)
        if self.args.llama_draft:
            by_head = self.drafting("llama", self.args.llama_draft)
            self.say("speed-up by a draft of Llama's kind", by_head["tokens_per_s"] / plain["tokens_per_s"], "", SPEED_UP)

    def start(self, name, *words):
        """-> seconds until a server is ready; says what it took of the GPU beside the plan."""
        flags = [word for word in self.args.flags if word not in ("--routing", "uniform")] + list(words)
        before, begin = used_mib(), time.monotonic()
        with ServerProcess(f"{self.args.build}/perigee", self.args.model, flags):
            seconds, used = time.monotonic() - begin, (used_mib() - before) * 2**20
        command = [f"{self.args.build}/perigee", "plan", self.args.model, *flags, "--json"]
        plan = json.loads(subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
        self.say(f"start {name}", seconds, "s")
        planned = planned_bytes(plan)
        self.say(f"memory used {name}, planned {planned / 2**30:.2f} GiB", used / 2**30, "GiB")
        self.say("  off the plan by a share of", abs(used / planned - 1), "", PLAN_OFF, most=True)
        return seconds

    def starts(self):
        plain = self.start("without drafts")
        for num_drafts, draft in ((3, self.args.draft), (7, self.args.draft), (3, self.args.llama_draft)):
            if draft:
                more = self.start(f"with {num_drafts} by {os.path.basename(draft)}", *speculation(draft, num_drafts)) - plain
                self.say("  more than without", more, "s", MORE_START_S, most=True)

    def attention(self):
        bench = f"{self.args.build}/bench/cuda_mla_bench"
        if not os.path.exists(bench):
            self.missed += 1
            return print(f"{bench} is not built: no rows of attention")
        printed = subprocess.run([bench, *ATTENTION], cwd=TOP, stdout=subprocess.PIPE, text=True, check=True, timeout=200).stdout
        print(printed)
        for row, bar in ATTENTION.items():
            found = re.search(rf"^{re.escape(row)}\s+([\d.]+)", printed, re.M)
            if found:
                self.say(row, float(found.group(1)), "us", bar, most=True)
            else:
                self.missed += 1
                print(f"{row}: no such row")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--results", default="bench/results")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--llama-draft", default=LLAMA_DRAFT, help="keys and values by head; empty: none")
    parser.add_argument("--flags", type=shlex.split, default=FLAGS)
    bench = Bench(parser.parse_args())
    bench.steps()
    if "cuda" in bench.args.flags:
        bench.starts()
        bench.attention()
    print(f"{bench.missed} bars missed")
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
