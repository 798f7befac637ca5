#!/usr/bin/env python3
"""Kimi-K2.5 at full size on 8 GPUs, beside its bars and what was predicted: tools/eight_bench.py [PART ...].

Parts, in the order in which they run without a name; each takes less than ten minutes on 8 H200s:
  predict   what `perigee plan` says of memory, and a step by arithmetic from traces of 30 layers on 4 GPUs (group_bench.py)
  comm      sum + residual + norm of rows of 7,168, NCCL beside it
  steps     decode steps and prefills, tp 8, for each dcp size and cache, from `bench context` and `bench step`
  trace     a decode step by op: each term beside the prediction, those more than 5 % off by name
  serve     a server under load, 8k in and 1k out, without and with drafts
  curves    step time by context of dcp 1 and of all GPUs (dcp_bench.py), Kimi-K2.5 and Kimi-Linear
  linear    Kimi-Linear-48B, one stream and 64
  equality  tests of groups of 8 ranks, and the storm
Figures and logs go to --results. To try it with fewer: --gpus 4 --model bench/models/kimi-k2.5-30l. Needs libcupti.so.13 on
LD_LIBRARY_PATH for the traces.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time

from group_bench import layer_terms, met, of_whole_model
from server_process import TOP, ServerProcess

LINEAR = "bench/models/kimi-linear-48b"
COMM_BARS = {1: 5.0}  # us, by rows
STEP_BARS = {(1, 1024): 200, (64, 8192): 1800}  # tokens a second, by (batch, context)
SERVE_BAR = 1400  # tokens a second
NEAR_TERM = 0.05  # of a prediction
DRAFTS = {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.35]}
CELLS = [("1,64", "1024,8192"), ("1", "102400")]  # batches, contexts
DRAFTED = [(1, 1024), (1, 102400), (64, 8192)]  # (batch, context)
PREFILLS = [8192, 32768, 131072]


def term_lines(predicted, measured):
    """-> a line for each term of a step that is further from its prediction than NEAR_TERM, the largest difference first.
    Both: {what: us}."""
    off = []
    for what in predicted.keys() | measured.keys():
        before, after = predicted.get(what, 0.0), measured.get(what, 0.0)
        if abs(after - before) > NEAR_TERM * max(before, after):
            off.append((abs(after - before), f"    {what}: predicted {before:.1f} us, measured {after:.1f} us"))
    return [line for _, line in sorted(off, reverse=True)]


class Eight:
    def __init__(self, arguments):
        self.args = arguments
        self.program = f"{arguments.build}/perigee"
        self.missed = 0
        self.flags = [*shlex.split(arguments.flags), "--load-format", "dummy"]
        os.makedirs(arguments.results, exist_ok=True)

    def say(self, name, figure, unit, bar=None, most=False):
        verdict = "" if bar is None else f"   bar {bar:g}: {'met' if met(figure, bar, most) else 'MISSED'}"
        self.missed += verdict.endswith("MISSED")
        print(f"{name:<56} {figure:10,.1f} {unit}{verdict}", flush=True)

    def ranks(self, dcp=1, cache="bf16"):
        return ["--tensor-parallel-size", str(self.args.gpus), "--decode-context-parallel-size", str(dcp),
                "--kv-cache-dtype", cache]

    def run(self, words, log):
        """-> what the program printed; None, and the end of its output, where it fails."""
        print("$", " ".join(words), flush=True)
        try:
            done = subprocess.run(words, cwd=TOP, capture_output=True, text=True, timeout=self.args.limit_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"not done after {self.args.limit_s} s")
            self.missed += 1
            return None
        with open(f"{self.args.results}/{log}.txt", "w", encoding="utf-8") as file:
            file.write(done.stdout + done.stderr)
        if done.returncode == 0:
            return done.stdout
        print((done.stdout + done.stderr)[-2000:])
        self.missed += 1
        return None

    def bench(self, kind, model, log, *words):
        """-> the figures of `perigee bench KIND`, or None."""
        file = f"{self.args.results}/{log}.json"
        if self.run([self.program, "bench", kind, model, *self.flags, "--routing", "uniform", *words, "--save-result", file], log) is None:
            return None
        with open(file, encoding="utf-8") as figures:
            return json.load(figures)

    def drafts(self):
        return ["--speculative-config", json.dumps({**DRAFTS, "model": self.args.draft})]

    def layouts(self):
        return [(dcp, cache) for dcp in sorted({1, self.args.gpus}) for cache in ("bf16", "fp8")]

    # --- Parts ---

    def predict(self):
        tokens = {}
        for dcp, cache in self.layouts():
            told = self.run([self.program, "plan", self.args.model, "--gpus", f"{self.args.gpus}xH200", "--json",
                             *self.ranks(dcp, cache)], f"plan_dcp{dcp}_{cache}")
            if told is None:
                continue
            plan = json.loads(told)
            self.say(f"plan, dcp {dcp}, {cache}: weights a rank", plan["weight_bytes"] / 2**30, "GiB")
            self.say(f"plan, dcp {dcp}, {cache}: cache", plan["tokens"], "tokens")
            tokens[dcp, cache] = plan["tokens"]
            if dcp > 1 and tokens.get((1, cache)):
                self.say(f"plan, {cache}: cache of dcp {dcp}", plan["tokens"] / tokens[1, cache], "times that of dcp 1")
        for what, us in self.predicted_terms().items():
            print(f"    {what}: {us:.1f} us")

    def predicted_terms(self):
        """{what: us} of a decode step of one sequence, from a trace that group_bench.py has left; empty without one."""
        try:
            with open(self.args.trace, encoding="utf-8") as file:
                figures = json.load(file)
        except FileNotFoundError:
            print(f"no {self.args.trace}: nothing to predict from")
            return {}
        lines, _ = of_whole_model(layer_terms(figures["table"]), self.args.layers, self.args.trace_layers)
        return {what: float(us) for what, us in re.findall(r"^ +(.*): [\d.]+ us in .* -> ([\d.]+)$", "\n".join(lines), re.M)}

    def comm(self):
        out = self.run([f"{self.args.build}/bench/cuda_comm_bench", str(self.args.gpus), "[1, 7168]", "[8, 7168]", "[64, 7168]"], "comm")
        for rows in (1, 8, 64):
            found = re.findall(rf"^(?:sum\+norm|sum, then norm,|scatter\S*) .*\[{rows}, 7168\]\s+([\d.]+) us", out or "", re.M)
            if found:
                self.say(f"sum, residual, norm of {rows} x 7,168", min(map(float, found)), "us", COMM_BARS.get(rows), most=True)
        print(out or "")

    def steps(self):
        for dcp, cache in self.layouts():
            for i, (batches, contexts) in enumerate(CELLS):
                figures = self.bench("context", self.args.model, f"steps{i}_dcp{dcp}_{cache}", *self.ranks(dcp, cache), "--batches", batches,
                                     "--contexts", contexts)
                for cell in (figures or {}).get("cells", []):
                    shape = (cell["batch"], cell["context"])
                    name = f"dcp {dcp}, {cache}, {shape[0]} x {shape[1]}"
                    if "step_us" in cell:
                        bar = STEP_BARS.get(shape) if dcp == 1 and cache == "bf16" else None
                        self.say(name, shape[0] / cell["step_us"] * 1e6, "tok/s", bar)
                    else:
                        print(f"{name}: {cell['why_none']}")
        for batch, context in DRAFTED:
            figures = self.bench("step", self.args.model, f"drafts_{batch}_{context}", *self.ranks(1, "fp8"), *self.drafts(), "--batch",
                                 str(batch), "--context", str(context), "--max-model-len", str(context + 1024))
            if figures:
                self.say(f"with drafts, dcp 1, fp8, {batch} x {context}", figures["tokens_per_s"], "tok/s")
        self.prefills()

    def prefills(self):
        """From a server, since a step takes 65,535 tokens at most."""
        flags = [*self.flags, *self.ranks(), "--max-num-batched-tokens", "8192", "--max-model-len", str(max(PREFILLS) + 64)]
        with ServerProcess(self.program, self.args.model, flags, f"{self.args.results}/prefill.log") as server:
            lengths = ",".join(map(str, PREFILLS))
            out = self.run([self.program, "bench", "prefill", "--port", str(server.port), "--lengths", lengths], "prefill")
            print(out or "", end="")

    def trace(self):
        figures = self.bench("step", self.args.model, "trace", *self.ranks(), "--batch", "1", "--context", "1024", "--trace")
        if figures is None:
            return
        measured = {f"{op}, {what}": us for (op, what), (us, _) in layer_terms(figures["table"]).items()}
        predicted = self.predicted_terms()
        if predicted:
            print("\n".join(term_lines(predicted, measured)) or "    every term within 5 %")
            self.say("step, predicted", sum(predicted.values()), "us")
        self.say("step, measured", figures["median_us"], "us")

    def serve(self):
        for name, drafts in (("plain", []), ("with drafts", self.drafts())):
            flags = [*self.flags, *self.ranks(1, "fp8"), "--max-model-len", "16384", *drafts]
            with ServerProcess(self.program, self.args.model, flags, f"{self.args.results}/serve_{name.replace(' ', '_')}.log") as server:
                result = f"{self.args.results}/serve_{name.replace(' ', '_')}.json"
                words = [self.program, "bench", "serve", "--port", str(server.port), "--num-prompts", "128", "--max-concurrency", "64",
                         "--random-input-len", str(self.args.input_len), "--random-output-len", str(self.args.input_len // 8),
                         "--save-result", result]
                if self.run(words, f"bench_serve_{name.replace(' ', '_')}") is None:
                    continue
                with open(result, encoding="utf-8") as file:
                    figures = json.load(file)
                self.say(f"serve, {name}, 64 at once", figures["output_throughput"], "tok/s", SERVE_BAR if not drafts else None)

    def curves(self):
        for model, contexts in ((self.args.model, "8192,32768,131072,262080"), (LINEAR, "8192,65536,262144,1048000")):
            name = os.path.basename(model)
            out = self.run([sys.executable, "tools/dcp_bench.py", "curves", model, "--program", self.program, "--tp", str(self.args.gpus),
                            "--dcp", f"1,{self.args.gpus}", "--flags", " ".join(self.flags), "--contexts", contexts, "--svg",
                            f"{self.args.results}/curves_{name}.svg"], f"curves_{name}")
            print(out or "")

    def linear(self):
        for batch in (1, 64):
            figures = self.bench("step", LINEAR, f"linear_{batch}", *self.ranks(), "--max-model-len", "16384", "--batch", str(batch),
                                 "--context", "1024")
            if figures:
                self.say(f"kimi-linear-48b, {batch} x 1,024", figures["tokens_per_s"], "tok/s")

    def equality(self):
        tests = "TensorParallelEquality.*Cuda*:ContextParallelEquality.*Cuda*:*EqualityOfDrafts*Cuda*"
        if self.run([f"{self.args.build}/tests/equality/equality_test", f"--gtest_filter={tests}", "--gtest_brief=1"], "equality"):
            print("equality: passed")
        env = f"PERIGEE_PROGRAM={os.path.abspath(self.program)}"
        flags = f"PERIGEE_FLAGS=--device cuda --kv-cache-memory-bytes 4G -tp={self.args.gpus}"
        if self.run(["env", env, flags, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e/test_storm.py"], "storm"):
            print("storm: passed")


PARTS = {"predict": Eight.predict, "comm": Eight.comm, "steps": Eight.steps, "trace": Eight.trace, "serve": Eight.serve,
         "curves": Eight.curves, "linear": Eight.linear, "equality": Eight.equality}


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--build", default="build")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--model", default="bench/models/kimi-k2.5")
    parser.add_argument("--draft", default="bench/models/kimi-k2.5-eagle3-mla", help="model of drafts")
    parser.add_argument("--layers", type=int, default=61, help="of the model")
    parser.add_argument("--trace", default="bench/results/group/kimi-k2.5-30l_4_B=1.json", help="a trace on half of the GPUs")
    parser.add_argument("--trace-layers", type=int, default=30)
    parser.add_argument("--flags", default="--device cuda", help="of perigee, as one word")
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--limit-s", type=int, default=540, help="of one program")
    parser.add_argument("--results", default="bench/results/eight")
    arguments = parser.parse_args(words)
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    return arguments


def main(words=None):
    arguments = parse(words)
    os.chdir(TOP)
    eight = Eight(arguments)
    for part in arguments.parts or PARTS:
        print(f"== {part}", flush=True)
        begin = time.monotonic()
        try:
            PARTS[part](eight)
        except (subprocess.TimeoutExpired, RuntimeError, OSError, KeyError) as error:
            eight.missed += 1
            print(f"failed: {error}")
        print(f"   {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{eight.missed} missed or failed")
    return 1 if eight.missed else 0


if __name__ == "__main__":
    sys.exit(main())
