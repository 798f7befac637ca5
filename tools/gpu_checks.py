#!/usr/bin/env python3
"""What can only be checked where a GPU is: `make gpu-check`, or tools/gpu_checks.py [--build build] [SECTION ...].

Each section has a time limit of its own and ends with a line "PASS name" or "FAIL name"; without a name all run but
`eight`, which is for 8 GPUs (eight_bench.py; it takes an hour). None of the others takes more than four minutes on an H200. The full-size sections write their figures, with the commands that made them,
to --results and hold them to the bars below. Needs the packages of tests/e2e/requirements.txt, and libcupti.so.13 on
LD_LIBRARY_PATH for the traces.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys
import time

from gpu_fence import fence
from gpu_sanitize import passed, sanitize
from server_process import TOP, ServerProcess

SERVED = ["--load-format", "dummy", "--device", "cuda", "--max-model-len", "16384"]
STEPS = [["--batch", "1", "--context", "1024", "--steps", "200"], ["--batch", "64", "--context", "1024", "--steps", "100"],
         ["--batch", "64", "--context", "1024", "--steps", "50", "--temperature", "1"],
         ["--form", "prefill", "--context", "8192", "--steps", "20", "--warm-steps", "10"]]
LEAST_TOKENS_S = {"v2-lite": 280, "kimi-linear-48b": 220}  # of the first of STEPS
MOST_OFF = 0.03  # between the sum of a traced step's rows and the median of untraced steps
LOADS = [["serve", "--num-prompts", "128", "--max-concurrency", "64", "--random-input-len", "1024", "--random-output-len", "128"],
         ["decode", "--contexts", "1024,8192", "--concurrencies", "1,16,64", "--output-len", "512"],
         ["prefill", "--lengths", "512,2048,8192"]]


def missed_bars(name, log):
    """-> a line for each bar that a full-size model's steps miss, a figure that is not there among them."""
    missed = []
    for step in STEPS:
        words = " ".join(step)
        printed = re.search(rf"^\$ perigee bench step [^\n]*{words}\n(.*?)(?=^\$ |\Z)", log, re.M | re.S)
        text = printed.group(1) if printed else ""
        rows = re.search(r"^The rows add up to ([\d.]+) us; .*, untraced ones ([\d.]+) us", text, re.M)
        if not rows or abs(float(rows.group(1)) / float(rows.group(2)) - 1) > MOST_OFF:
            missed.append(f"{words}: {rows.group(0) if rows else 'no sum of rows'}; at most {100 * MOST_OFF:.0f} % off")
        rate = re.search(r"^median step .*, ([\d.]+) tok/s$", text, re.M)
        least = LEAST_TOKENS_S[name] if step is STEPS[0] else 0
        if not rate or float(rate.group(1)) < least:
            missed.append(f"{words}: {rate.group(1) if rate else 'no'} tok/s; at least {least}")
    return missed


def served_models():
    """The bundled models; drafts beside them have no vocabulary of their own."""
    return sorted(os.path.dirname(path) for path in glob.glob("models/*/tiktoken.model"))


class Runner:
    def __init__(self, build, results):
        self.build, self.results = build, results
        self.program = f"{build}/perigee"
        self.deadline = 0.0

    def run(self, command, env=None, log=None):
        """Runs it within the section's time; `log` gets its standard output, too."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(command, 0)
        process = subprocess.run(command, cwd=TOP, env={**os.environ, **(env or {})}, timeout=left, text=True,
                                 stdout=subprocess.PIPE)
        sys.stdout.write(process.stdout)
        sys.stdout.flush()
        if log:
            log.write(process.stdout)
        return process

    def tests(self, program, tests="*", shards=1):
        """A test program whose tests were skipped has found no GPU: a failure here, as is a pattern that matches no test.

        Shards run at once, for tests that compute what they expect on one core.
        """
        def shard(i):
            env = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(i)}
            process = self.run([f"{self.build}/{program}", f"--gtest_filter={tests}", "--gtest_brief=1"], env)
            return process.returncode == 0 and passed(process.stdout)
        with concurrent.futures.ThreadPoolExecutor(shards) as pool:
            return all(list(pool.map(shard, range(shards))))

    def collectives(self):
        told = subprocess.run([self.program, "doctor", "--json"], capture_output=True, text=True, check=False)
        gpus = len(json.loads(told.stdout)["gpus"])
        left_out = "*MemoryCanBeReserved*OnOneGpu*"  # a GPU that ranks share waits for all of them before it reserves memory
        if gpus < 4:
            left_out += ":*GroupsOfConsecutiveRanks*Apart*"
        tests = ("*OnOneGpu*:*Apart*" if gpus > 1 else "*OnOneGpu*") + f"-{left_out}"
        return self.tests("src/comm/cuda/comm_cuda_test", tests) and self.tests("src/ops/cuda/ops_cuda_test", tests)

    def served(self):
        flags = "--device cuda --kv-cache-memory-bytes 4G"  # several servers at once
        env = {"PERIGEE_PROGRAM": os.path.abspath(self.program), "PERIGEE_FLAGS": flags}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e"]
        codes = [self.run(command, {**env, "PERIGEE_MODEL": model}).returncode for model in served_models()]
        return bool(codes) and not any(codes)

    def score(self, *flags):
        codes = [self.run([sys.executable, "tools/score.py", "--program", self.program, "--model", model, "--concurrency", "64",
                           "--flags", " ".join(["--device", "cuda", *flags])]).returncode for model in served_models()]
        return bool(codes) and not any(codes)

    def full_size(self, name, cache):
        flags = ["--kv-cache-memory-bytes", cache, *SERVED]
        model = f"bench/models/{name}"
        os.makedirs(self.results, exist_ok=True)
        with open(f"{self.results}/gpu_{name}.txt", "w", encoding="utf-8") as log:
            good = all([self.measure(["bench", "step", model, *flags, "--trace", *step], log) for step in STEPS])
            log.write(f"$ perigee serve {model} {' '.join(flags)}\n")
            server_log = f"{self.results}/gpu_{name}_server.log"
            with ServerProcess(self.program, model, flags, server_log) as server:
                good &= all([self.measure(["bench", *load, "--port", str(server.port)], log) for load in LOADS])
            good &= server.process.returncode == 0
        with open(f"{self.results}/gpu_{name}.txt", encoding="utf-8") as log:
            missed = missed_bars(name, log.read())
        for line in missed:
            print(f"missed: {line}")
        return good and not missed

    def measure(self, words, log):
        line = f"$ perigee {' '.join(words)}\n"
        sys.stdout.write(line)
        log.write(line)
        return self.run([self.program, *words], log=log).returncode == 0

    def section(self, name, limit_s, check):
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        self.deadline = begin + limit_s
        try:
            good, why = check(self), ""
        except (subprocess.TimeoutExpired, RuntimeError, OSError) as error:
            good, why = False, f": {error}"
        print(f"{'PASS' if good else 'FAIL'} {name} ({time.monotonic() - begin:.0f} s){why}", flush=True)
        return good


SECTIONS = {  # name: (seconds, check)
    "golden": (60, lambda r: r.tests("tests/golden/golden_test", "*Cuda*")),
    "conformance": (240, lambda r: all([r.tests(f"tests/conformance/{name}", shards=6) for name in ("conformance_test", "cuda_mla_test")])),
    "kernels": (60, lambda r: r.tests("src/exec/cuda/exec_cuda_test") and r.tests("src/tensor/cuda/tensor_cuda_test") and r.tests("src/kv/cuda/kv_cuda_test")),
    "collectives": (60, Runner.collectives),
    "equality": (150, lambda r: r.tests("tests/equality/equality_test", "Device*:*Cuda*-SettingsOfDrafts*:*DraftsAreAcceptedAsOnOneNode*")),
    "drafts": (400, lambda r: r.tests("tests/equality/equality_test", "SettingsOfDrafts*Cuda")),  # every pairing with a target
    "served": (240, Runner.served),  # the server's tests, with the storm, a lost device, and pairs of servers
    "score": (150, Runner.score),  # task accuracy of the tiny models against their model cards
    "score-fp8": (150, lambda r: r.score("--kv-cache-dtype", "fp8")),
    "fence": (60, lambda r: fence(r.program)),
    "sanitize": (300, lambda r: sanitize(r.build, f"{r.build}/sanitize", r.deadline - time.monotonic())),
    "v2-lite": (180, lambda r: r.full_size("v2-lite", "40G")),
    "kimi-linear-48b": (240, lambda r: r.full_size("kimi-linear-48b", "20G")),
    "eight": (4800, lambda r: r.run([sys.executable, "tools/eight_bench.py", "--build", r.build]).returncode == 0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--build", default="build")
    parser.add_argument("--results", default="bench/results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    os.chdir(TOP)
    runner = Runner(arguments.build, arguments.results)
    outcomes = [runner.section(name, *SECTIONS[name]) for name in arguments.sections or [name for name in SECTIONS if name != "eight"]]
    print(f"{sum(outcomes)} of {len(outcomes)} sections passed")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
