#!/usr/bin/env python3
"""What groups of GPUs give, beside the bars for H200s: tools/group_bench.py [--build build] [--gpus N] [--results FOLDER].

Runs `cuda_comm_bench` and `perigee bench step` with 1, 2 and 4 GPUs, as far as there are so many, and prints a line for each
figure. A bar counts as met within 3 %. With 4 GPUs also the first 30 layers of Kimi-K2.5, and from their traces what 61
layers on 8 GPUs would take. Takes about 10 minutes on 4 GPUs. Needs libcupti.so.13 on LD_LIBRARY_PATH for the traces.
"""
import argparse
import json
import os
import re
import subprocess
import sys

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEP = ["--device", "cuda", "--load-format", "dummy", "--max-model-len", "16384", "--routing", "uniform"]
CACHE = {"kimi-linear-48b": "12G", "v2-lite": "12G", "kimi-k2.5-30l": "24G"}
SHAPES = {"B=1": ["--batch", "1", "--context", "1024", "--steps", "200"],
          "B=64": ["--batch", "64", "--context", "1024", "--steps", "100"],
          "64 x 8k": ["--batch", "64", "--context", "8192", "--steps", "50"],
          "prefill 8k": ["--form", "prefill", "--context", "8192", "--steps", "20", "--warm-steps", "10"]}
COMM_BARS = {1: 4.5, 64: 11.0}  # us on 4 GPUs: sum, residual, norm of so many rows of 7,168
KIMI_LINEAR_BARS = {  # (GPUs, shape): tokens a second, or speed-up over one GPU
    (2, "B=1"): 540, (4, "B=1"): 650, (2, "B=64"): 1.7, (4, "B=64"): 2.8, (2, "prefill 8k"): 1.5, (4, "prefill 8k"): 2.3}
NEAR = 0.03
BYTES_S = 4.54e12  # that an H200 reads
OUTSIDE = {"embed", "gaps", "outside the model", "gather_rows", "gather_residual"}
REPLICATED = re.compile(r"^(q_a|q_a norm|kv_a|router|norm|sum, norm|weighted sum|rows|.*norm, rope)")
WAITING = "waiting for other ranks"


def met(figure, bar, most=False):
    return figure <= bar * (1 + NEAR) if most else figure >= bar * (1 - NEAR)


def verdict(figure, bar, most=False):
    if bar is None:
        return ""
    return f"   bar {bar:g}: {'met' if met(figure, bar, most) else 'MISSED'}"


def best_sum_norm(text, rows):
    """-> us of the faster form of sum, residual and norm of rows x 7168 in the output of cuda_comm_bench."""
    found = re.findall(rf"^(?:sum\+norm|sum, then norm,|scatter\S*) .*\[{rows}, 7168\]\s+([\d.]+) us", text, re.M)
    return min(map(float, found)) if found else None


def layer_terms(table):
    """-> {what: (us, us at the memory rate that divide by the ranks)} of one layer's worth: sums over all layers."""
    terms = {}
    for group in table:
        if group["op"] == WAITING:
            continue
        for part in group["parts"] or [dict(group, what=group["op"])]:
            read_us = part["bytes"] / BYTES_S * 1e6
            divides = 0 if REPLICATED.match(part["what"]) else min(read_us, part["us"])
            us, divided = terms.get((group["op"], part["what"]), (0, 0))
            terms[(group["op"], part["what"])] = (us + part["us"], divided + divides)
    return terms


def of_whole_model(terms, layers, measured_layers):
    """-> lines and the sum: the step of `layers` layers on twice the GPUs. What reads weights or cache takes half of its
    reading, and as long as now beside that; what a group exchanges takes as long as now."""
    lines, total = [], 0
    for (op, what), (us, divided) in terms.items():
        scale = 1 if op in OUTSIDE or op.startswith("rms_norm") else layers / measured_layers
        if re.match(r"linear \d+ -> \d{5,}", op):
            scale = 1  # the head
        figure = (us - divided / 2) * scale
        total += figure
        lines.append(f"    {op}, {what}: {us:.1f} us in {measured_layers} layers, half of {divided:.1f} divides -> {figure:.1f}")
    return lines, total


class Bench:
    def __init__(self, build, results):
        self.program, self.comm, self.results = f"{build}/perigee", f"{build}/bench/cuda_comm_bench", results
        self.missed = 0
        os.makedirs(results, exist_ok=True)

    def say(self, name, figure, unit, bar=None, most=False):
        self.missed += bar is not None and not met(figure, bar, most)
        print(f"{name:<44} {figure:10,.1f} {unit}{verdict(figure, bar, most)}", flush=True)

    def step(self, model, gpus, shape, trace=False):
        """-> the figures of `bench step`; None, and its output, where it fails."""
        file = f"{self.results}/{model}_{gpus}_{shape.replace(' ', '_')}.json"
        command = [self.program, "bench", "step", f"bench/models/{model}", *STEP, "--kv-cache-memory-bytes", CACHE[model],
                   f"-tp={gpus}", *SHAPES[shape], *(["--trace"] if trace else []), "--save-result", file]
        print("$", " ".join(command[1:]), flush=True)
        done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=240, check=False)
        with open(file.replace(".json", ".txt"), "w", encoding="utf-8") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode != 0:
            print(done.stderr[-2000:])
            self.missed += 1
            return None
        with open(file, encoding="utf-8") as figures:
            return json.load(figures)

    def collectives(self, gpus):
        done = subprocess.run([self.comm, str(gpus), "[1, 7168]", "[64, 7168]", "[8192, 7168]"], capture_output=True, text=True,
                              timeout=120, check=False)
        print(done.stdout, end="")
        for rows, bar in COMM_BARS.items():
            us = best_sum_norm(done.stdout, rows)
            if us is None:
                self.missed += 1
                print(f"no figure of {rows} rows: {done.stderr[-500:]}")
            else:
                self.say(f"{gpus} GPUs: sum, residual, norm of {rows} x 7,168", us, "us", bar if gpus == 4 else None, most=True)

    def model(self, name, sizes, bars):
        one = {}
        for gpus in sizes:
            for shape in ("B=1", "B=64", "prefill 8k"):
                figures = self.step(name, gpus, shape)
                if figures is None:
                    continue
                one.setdefault(shape, figures["median_us"])
                bar = bars.get((gpus, shape))
                title = f"{name}, {gpus} GPUs, {shape}"
                self.say(title, figures["tokens_per_s"], "tok/s", bar if shape == "B=1" else None)
                self.say(title, one[shape] / figures["median_us"], "times one GPU", bar if shape != "B=1" else None)

    def kimi_k25(self):
        for shape in ("B=1", "64 x 8k", "prefill 8k"):
            figures = self.step("kimi-k2.5-30l", 4, shape, trace=True)
            if figures is None:
                continue
            self.say(f"kimi-k2.5, 30 layers, 4 GPUs, {shape}", figures["median_us"] / 30, "us a layer")
            lines, total = of_whole_model(layer_terms(figures["table"]), 61, 30)
            print("\n".join(lines))
            self.say(f"kimi-k2.5, 61 layers, 8 GPUs, {shape}, by arithmetic", total, "us a step")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--gpus", type=int, help="at most so many; default: all")
    parser.add_argument("--results", default="bench/results/group")
    arguments = parser.parse_args()
    os.chdir(TOP)
    bench = Bench(arguments.build, arguments.results)
    told = subprocess.run([bench.program, "doctor", "--json"], capture_output=True, text=True, check=False)
    found = len(json.loads(told.stdout)["gpus"])
    most = min(found, arguments.gpus or found)
    sizes = [size for size in (1, 2, 4) if size <= most]
    for gpus in sizes[1:]:
        bench.collectives(gpus)
    bench.model("kimi-linear-48b", sizes, KIMI_LINEAR_BARS)
    bench.model("v2-lite", sizes, {})
    if most >= 4:
        bench.kimi_k25()
    else:
        print(f"{most} GPUs: Kimi-K2.5 needs 4")
    print(f"{bench.missed} bars missed")
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
