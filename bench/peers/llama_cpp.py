#!/usr/bin/env python3
"""Perigee beside llama.cpp on this machine's CPU: the same geometry, in alternating pairs.

    python3 bench/peers/llama_cpp.py --cache DIR --prepare      builds llama.cpp (10 minutes on 2 cores), writes models
    python3 bench/peers/llama_cpp.py --cache DIR --rows v2-lite-int4

llama.cpp is built from the source package of llama-cpp-python, pinned below, and only its llama-batched-bench is called.
DIR takes 1 GB for the build and 2 to 5 GB a model. Weights are random: experts INT4 in groups of 32 (llama.cpp: Q4_0)
where the row says int4 or int8, all else bf16, or int8 (llama.cpp: Q8_0). Perigee is `perigee bench context | step`, experts drawn at random for each
token. A figure is the median of the pairs, a ratio that of the pairs' ratios; the processes of a pair change places.
With --turns N short decodes are measured by programs that stay loaded, one of each side for all rows of a model: each measures
a row once, uncounted, and N times, and is stopped (SIGSTOP) while the other does, so that turns follow each other within
seconds and meet the same memory. `perigee doctor` measures memory after each turn: of one stream, the share of its rate is printed.
With --isa avx2 both sides are limited to AVX2. The load average should be below 0.3 before a run; it is printed.
"""
import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import gguf_models

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
BUILDS = {"native": ["-DGGML_NATIVE=ON"],
          "avx2": ["-DGGML_NATIVE=OFF", *(f"-DGGML_{x}=ON" for x in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"))]}
FILLED_CONTEXT = 512  # from here on caches are really filled; below, what `bench context` skips is a page or two
# Folder of bench/models, layers, INT4 experts, INT8 for all else.
MODELS = {"v2-lite-int4": ("v2-lite-int4", 9, True, False), "v2-lite-bf16": ("v2-lite", 6, False, False),
          "v2-lite-int8": ("v2-lite-int4", 9, True, True), "kimi-linear-int4": ("kimi-linear-4l", 4, True, False),
          "kimi-linear-int8": ("kimi-linear-4l", 4, True, True), "v2-lite-long": ("v2-lite-int4", 2, True, False)}


@dataclass(frozen=True)
class Row:
    model: str
    form: str  # decode or prefill
    streams: int
    context: int

    def name(self):
        if self.form == "prefill":
            return f"{self.model} prefill {self.context}"
        return f"{self.model} decode {self.streams} at {self.context}"


def decode(model, context, *streams):
    return [Row(model, "decode", n, context) for n in streams]


def prefill(model, *lengths):
    return [Row(model, "prefill", 1, n) for n in lengths]


ROWS = [*decode("v2-lite-int4", 128, 1, 4, 16), *decode("v2-lite-int4", 4096, 1), *prefill("v2-lite-int4", 512, 2048),
        *decode("v2-lite-int8", 128, 1, 4, 16), *decode("v2-lite-int8", 4096, 1), *prefill("v2-lite-int8", 512, 2048),
        *decode("v2-lite-bf16", 128, 1, 4, 16), *prefill("v2-lite-bf16", 512),
        *decode("kimi-linear-int4", 128, 1, 4, 16), *prefill("kimi-linear-int4", 512),
        *decode("kimi-linear-int8", 128, 1, 4, 16), *prefill("kimi-linear-int8", 512),
        *decode("v2-lite-long", 128, 1), *decode("v2-lite-long", 4096, 1), *decode("v2-lite-long", 8192, 1),
        *decode("v2-lite-long", 16384, 1)]


def model_config(model):
    source, layers, quantised, _ = MODELS[model]
    folder = ROOT / "bench" / "models"
    config = json.loads((folder / source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if quantised and "quantization_config" not in config:
        experts_int4 = json.loads((folder / "v2-lite-int4/config.json").read_text())
        config["quantization_config"] = experts_int4["quantization_config"]
    return config


def dense_kind(model):
    return "q8" if MODELS[model][3] else "bf16"


def source_folder(cache):
    folder = cache / f"llama_cpp_python-{VERSION}"
    if folder.exists():
        return folder / "vendor/llama.cpp"
    index = urllib.request.Request(f"https://pypi.org/simple/{PACKAGE}/",
                                   headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(index, timeout=60) as reply:
        files = json.load(reply)["files"]
    (url,) = [f["url"] for f in files if f["hashes"].get("sha256") == SHA256]
    with urllib.request.urlopen(url, timeout=600) as reply:
        data = reply.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        sys.exit(f"{url}: not the file with sha256 {SHA256}")
    package = cache / "package.tar.gz"
    package.write_bytes(data)
    with tarfile.open(package) as archive:
        archive.extractall(cache, filter="data")
    return folder / "vendor/llama.cpp"


def build(cache, isa):
    folder = cache / f"build-{isa}"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", *BUILDS[isa],
               *(f"-DCMAKE_{x}_COMPILER_LAUNCHER=ccache" for x in ("C", "CXX"))]
    subprocess.run(["cmake", "-S", source_folder(cache), "-B", folder, "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "llama-batched-bench"], check=True)


def gguf_file(cache, model):
    path = cache / f"{model}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        gguf_models.write(model_config(model), part, dense_kind(model))
        part.rename(path)
    return path


def run(command, limit_s=900):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit_s)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


class Turns:
    """A program that measures rows, each several times, and prints a line each time; stopped between its turns."""

    def __init__(self, command, line):
        self.process = subprocess.Popen(["stdbuf", "-oL", *map(str, command)], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.process.send_signal(signal.SIGSTOP)
        self.line = re.compile(line)

    def take(self):
        """The line's figure."""
        self.process.send_signal(signal.SIGCONT)
        for text in self.process.stdout:
            if found := self.line.match(text):
                self.process.send_signal(signal.SIGSTOP)
                return float(found[1])
        sys.exit(f"{' '.join(self.process.args)}: ended with {self.process.wait()}")

    def end(self):
        self.process.kill()
        self.process.wait()


def takes(group, turns):
    """Streams of each take: of each row one that loads or warms up, and the turns."""
    return [row.streams for row in group for _ in range(turns + 1)]


class Peer:
    def __init__(self, arguments):
        self.program = arguments.cache / f"build-{arguments.isa}/bin/llama-batched-bench"
        self.a = arguments

    def measure(self, group):
        """{row: tokens a second} of rows with one model and context."""
        out = run(self.command(group, sorted({row.streams for row in group})))
        cells = {c["pl"]: c for c in map(json.loads, re.findall(r"^\{.*\}$", out, re.M))}
        return {row: cells[row.streams]["speed_tg" if row.form == "decode" else "speed_pp"] for row in group}

    def command(self, group, streams):
        context = group[0].context
        steps = self.a.steps if any(row.form == "decode" for row in group) else 1
        # One prompt for all streams; a recurrent state cannot be copied back to a prompt's end.
        shared = [] if "linear" in group[0].model else ["-pps"]
        size = max(streams) * (steps + context) + 256
        return [self.program, "-m", gguf_file(self.a.cache, group[0].model), "-t", self.a.threads, "-c", size,
                "-b", 2048, "-ub", self.a.ubatch, "-npp", context, "-ntg", steps, "-npl", ",".join(map(str, streams)),
                *shared, "--output-format", "jsonl", *(["-fa", self.a.flash] if self.a.flash else [])]

    def turns(self, group):
        return Turns(self.command(group, takes(group, self.a.turns)), r"\{.*\"speed_tg\": ([\d.]+)")

    @staticmethod
    def tokens_per_s(row, figure):
        return figure


class Perigee:
    def __init__(self, arguments, folder):
        self.a, self.folder = arguments, Path(folder)

    def model_folder(self, model):
        folder = self.folder / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config(model)))
        return folder

    def bench(self, kind, model, *flags):
        result = self.folder / "result.json"
        run([*self.command(kind, model), "--save-result", result, *flags])
        return json.loads(result.read_text())

    def command(self, kind, model):
        isa = ["--cpu-isa", "avx2"] if self.a.isa == "avx2" else []
        online = ["--quantization", "int8_per_channel_weight_only"] if dense_kind(model) == "q8" else []
        return [self.a.program, "bench", kind, self.model_folder(model), "--load-format", "dummy", "--routing", "uniform",
                "--device", "cpu", "--threads", self.a.threads, "--kv-cache-memory-bytes", "1G", *isa, *online]

    def turns(self, group):
        command = [*self.command("context", group[0].model), "--batches", ",".join(map(str, takes(group, self.a.turns))),
                   "--contexts", group[0].context, "--warm-steps", 1, "--steps", max(3, self.a.steps // 2)]
        return Turns(command, r"\| \d+ \| \d+ \| ([\d.]+) \|")

    @staticmethod
    def tokens_per_s(row, step_us):
        return row.streams / step_us * 1e6

    def measure(self, group):
        model, context = group[0].model, group[0].context
        out, steps = {}, self.a.steps
        short = [row for row in group if row.form == "decode" and row.context < FILLED_CONTEXT]
        if short:
            figures = self.bench("context", model, "--batches", ",".join(str(row.streams) for row in short), "--contexts",
                                 context, "--warm-steps", 1, "--steps", max(3, steps // 2))
            for row, cell in zip(short, figures["cells"]):
                out[row] = row.streams / cell["step_us"] * 1e6
        for row in (row for row in group if row not in short):
            few = {"prefill": (1, 2 if context <= 1024 else 1), "decode": (2, steps)}[row.form]
            figures = self.bench("step", model, "--form", row.form, "--batch", row.streams, "--context", context,
                                 "--warm-steps", few[0], "--steps", few[1])
            out[row] = figures["tokens_per_s"]
        return out


def read_rate(report):
    """GB/s by what `perigee doctor` prints."""
    return float(re.search(r"read at ([\d.]+) GB/s", report).group(1))


def machine(arguments):
    report = run([arguments.program, "doctor"])
    return read_rate(report), " / ".join(re.sub(r"\s+", " ", line) for line in report.splitlines()[:4])


def token_bytes(model):
    return gguf_models.Geometry(model_config(model), dense_kind(model)).token_bytes()


def print_table(rows, pairs, rate):
    print("\n| | MB a token | perigee, tok/s | % of the read rate | llama.cpp, tok/s | ratio | pairs |\n" + "|---" * 7 + "|")
    for row in rows:
        ours, theirs = ([pair[side][row] for pair in pairs[row]] for side in (0, 1))
        speed, size = statistics.median(ours), token_bytes(row.model)
        one_stream = row.streams == 1 and row.form == "decode"
        share = f"{100 * speed * size / rate / 1e9:.0f}" if one_stream else ""
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        print(f"| {row.name()} | {size / 1e6:.0f} | {speed:.1f} | {share} | {statistics.median(theirs):.1f} | {ratio:.2f} | "
              f"{len(ours)} |", flush=True)


def share_text(row, ours, rates):
    """Of one stream: the median share of what memory gives, measured before and after each turn, that weights take."""
    if row.streams > 1:
        return ""
    size = token_bytes(row.model) / 1e9
    return f"{100 * statistics.median(2 * speed * size / sum(near) for speed, near in zip(ours, itertools.pairwise(rates))):.0f}"


def take_turns(groups, sides, count, program):
    """Rows of tok/s, and of quartiles of the ratio of turns that follow each other."""
    print("\n| | perigee, tok/s | % of the read rate | llama.cpp, tok/s | ratio | its quartiles | turns |\n" + "|---" * 7 + "|")
    for group in groups:
        with contextlib.ExitStack() as stack:  # no program stays behind, stopped, if the other one fails
            programs = []
            for side in sides:
                programs.append(side.turns(group))
                stack.callback(programs[-1].end)
            for row in group:
                figures, rates = [], []
                for _ in range(count + 1):
                    figures.append([side.tokens_per_s(row, loaded.take()) for side, loaded in zip(sides, programs)])
                    rates.append(read_rate(run([program, "doctor"])))
                figures = figures[1:]
                ours, theirs = zip(*figures)
                low, ratio, high = statistics.quantiles((a / b for a, b in figures), n=4, method="inclusive")
                print(f"| {row.name()} | {statistics.median(ours):.1f} | {share_text(row, ours, rates)} | "
                      f"{statistics.median(theirs):.1f} | {ratio:.2f} | {low:.2f}, {high:.2f} | {count} |", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the build and of the models")
    parser.add_argument("--program", type=Path, default=ROOT / "build/perigee")
    parser.add_argument("--prepare", action="store_true", help="build and write only")
    parser.add_argument("--rows", default="", help="regular expression of the rows' names")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=0, help="2 or more: see above; decodes at less than "
                        f"{FILLED_CONTEXT} tokens only")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ubatch", type=int, default=512, help="llama.cpp's -ub")
    parser.add_argument("--flash", choices=["on", "off"], help="llama.cpp's -fa; without: its choice")
    parser.add_argument("--isa", choices=list(BUILDS), default="native")
    arguments = parser.parse_args()
    if arguments.turns == 1 or arguments.turns < 0:
        parser.error("--turns must be 2 or more: quartiles of a ratio need as many")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    return arguments


def main():
    arguments = parse()
    rows = [row for row in ROWS if re.search(arguments.rows, row.name())]
    groups = {}
    for row in rows:
        groups.setdefault((row.model, row.context), []).append(row)
    if arguments.prepare:
        build(arguments.cache, arguments.isa)
        for model in dict.fromkeys(row.model for row in rows):
            gguf_file(arguments.cache, model)
        return
    rate, machine_text = machine(arguments)
    print(f"{machine_text}\nllama.cpp of {PACKAGE} {VERSION}, {arguments.isa}, {arguments.threads} threads, "
          f"load average {os.getloadavg()[0]:.2f}", flush=True)
    pairs = {row: [] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        sides = (Perigee(arguments, folder), Peer(arguments))
        if arguments.turns:
            short = [[row for row in group if row.form == "decode"] for (_, context), group in groups.items()
                     if context < FILLED_CONTEXT]
            if not any(short):
                sys.exit(f"--turns: no row of decodes at less than {FILLED_CONTEXT} tokens matches --rows {arguments.rows!r}")
            return take_turns(filter(None, short), sides, arguments.turns, arguments.program)
        for i in range(arguments.pairs):
            for group in groups.values():
                figures = {side: side.measure(group) for side in (sides if i % 2 == 0 else sides[::-1])}
                for row in group:
                    pairs[row].append([figures[side] for side in sides])
                    ours, theirs = (figures[side][row] for side in sides)
                    print(f"  {i + 1}: {row.name()}: {ours:.2f} {theirs:.2f}", flush=True)
    print(f"load average {os.getloadavg()[0]:.2f}")
    print_table(rows, pairs, rate)


if __name__ == "__main__":
    main()
