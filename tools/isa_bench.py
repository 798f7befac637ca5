#!/usr/bin/env python3
"""The bundled models on each instruction set of this machine: tools/isa_bench.py [--program build/perigee] [--repeats 3].

Prints tokens/s of one server each: decode of 1 and of 16 streams at 512 tokens of context, prefill of 512 tokens. The sets take
turns, and the best of the repeats counts: what else runs on the machine can only slow them down. --list: the names of the sets.
Standard library only.
"""
import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

from server_process import TOP, ServerProcess

SETS = {"avx2": "avx2", "avx512": "avx512_bf16", "amx": "amx_bf16"}  # the name of --cpu-isa -> what cpuinfo calls it
FIGURES = [("decode, 1 stream", "decode", "1"), ("decode, 16 streams", "decode", "16"), ("prefill of 512 tokens", "prefill", "512")]
CONTEXT = "512"


def sets_of(cpuinfo):
    """Those of the first core, the least first."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return [name for name, flag in SETS.items() if flags and flag in flags[1].split()]


def bench(program, server, kind, *words):
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "figures.json")
        subprocess.run([program, "bench", kind, "--port", str(server.port), "--save-result", result, *words], check=True, stdout=subprocess.DEVNULL)
        with open(result, encoding="utf-8") as file:
            return json.load(file)


def measure(program, model, isa):
    with ServerProcess(program, model, ["--device", "cpu", "--cpu-isa", isa]) as server:
        decode = bench(program, server, "decode", "--contexts", CONTEXT, "--concurrencies", "1,16")[CONTEXT]
        prefill = bench(program, server, "prefill", "--lengths", "512")
    return {name: {"decode": decode, "prefill": prefill}[kind][key] for name, kind, key in FIGURES}


def best(runs):
    return {name: max(run[name] for run in runs) for name in runs[0]}


def table(figures):
    """{(model, set): {figure: tokens/s}} -> lines; a set that the machine lacks has a dash."""
    lines = ["| tokens/s | " + " | ".join(SETS) + " |", "|---|" + "---|" * len(SETS)]
    for model in dict.fromkeys(model for model, _ in figures):
        for name, _, _ in FIGURES:
            cells = [f"{figures[model, isa][name]:,.0f}" if (model, isa) in figures else "-" for isa in SETS]
            lines.append(f"| {model}: {name} | " + " | ".join(cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=f"{TOP}/build/perigee")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        sets = sets_of(file.read())
    if arguments.list:
        print(*sets)
        return 0
    runs = {}
    for model in sorted(map(os.path.dirname, glob.glob(f"{TOP}/models/*/tiktoken.model"))):
        for _ in range(arguments.repeats):
            for isa in sets:
                runs.setdefault((os.path.basename(model), isa), []).append(measure(arguments.program, model, isa))
    print("\n".join(table({key: best(each) for key, each in runs.items()})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
