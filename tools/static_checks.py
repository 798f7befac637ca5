#!/usr/bin/env python3
"""The lint that needs a compiler: each header compiles alone, and each source passes clang-tidy (.clang-tidy).

What passed is remembered under ~/.cache/perigee-lint by the content of the file and of everything of ours that it
includes, so a second `make lint` checks only what changed. Named files are checked alone. Files that include CUDA's headers are left to the CUDA
build: a machine without them must lint too.
"""
import concurrent.futures
import hashlib
import os
import pathlib
import re
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "perigee-lint"
ROOTS = ("src", "tests", ".")
CXX, CLANG_TIDY = "g++", "clang-tidy-14"
# One instruction set that has every intrinsic we use; the build enters such files after a run-time check.
FLAGS = ["-std=c++20", "-march=sapphirerapids", *(f"-I{root}" for root in ROOTS),
         '-DPERIGEE_VERSION="0"']
# Of the files of a folder that are built with headers of their own in place of others.
INSTEAD = {"tests/sim/pd/": "tests/sim/pd/instead"}
WARNINGS = ["-Wall", "-Wextra", "-Wno-missing-field-initializers"]

# Headers that lint is without: of CUDA, and the inner ones of xgrammar, which a build fetches.
ELSEWHERE = re.compile(r"#include <(cuda|nccl|earley_parser|compiled_grammar_impl|xgrammar/)")

# (file, check) -> reason. Checks that fit nowhere are left out in .clang-tidy, each with its reason.
EXCEPTIONS = {
    ("src/control/scheduler_testing.h", "readability-redundant-string-init"): "a default argument, written as one",
    ("src/control/block_pool_test.cc", "bugprone-use-after-move"): "shows that a moved-from handle is empty",
    ("src/ops/cpu/matrix_test.cc", "bugprone-suspicious-memory-comparison"): "the same bits are the claim",
}


def instead_of(name):
    return [root for folder, root in INSTEAD.items() if name.startswith(folder)]


def own_includes(name, known):
    """The file and everything of ours that it includes, directly or not. `known` caches direct includes."""
    closure, left = set(), [name]
    for root in instead_of(name):
        left += [os.path.relpath(path, TOP) for path in (TOP / root).rglob("*.h")]
    while left:
        file = left.pop()
        if file in closure:
            continue
        closure.add(file)
        if file not in known:
            text = (TOP / file).read_text(encoding="utf-8")
            found = set()
            for target in re.findall(r'^#include "([^"]+)"', text, re.M):
                for root in (os.path.dirname(file), *ROOTS):
                    path = os.path.normpath(os.path.join(root, target))
                    if (TOP / path).is_file():
                        found.add(path)
                        break
            known[file] = (text, found)
        left.extend(known[file][1])
    return closure


def headers_command(name):
    return [CXX, *(f"-I{root}" for root in instead_of(name)), *FLAGS, *WARNINGS, "-Wno-unused-function", "-Werror", "-fsyntax-only", "-include", name, "-x", "c++",
            "/dev/null"]


def sources_command(name):
    faults = ["-DPERIGEE_FAULTS"] if name.startswith("tests/sim/") else []
    return [CLANG_TIDY, "--quiet", name, "--", *(f"-I{root}" for root in instead_of(name)), *FLAGS, *WARNINGS, *faults]


def excused(line):
    found = re.match(r"(\S+?):\d+:\d+: (?:warning|error): .*\[([\w.,-]+)\]$", line)
    if not found:
        return False
    name = os.path.relpath(found.group(1), TOP) if os.path.isabs(found.group(1)) else found.group(1)
    return any((name, check) in EXCEPTIONS for check in found.group(2).split(","))


def check(name, marker):
    """Returns the findings of one file, as text; writes the marker when there are none."""
    command = headers_command(name) if name.endswith(".h") else sources_command(name)
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    said = done.stdout + (done.stderr if name.endswith(".h") or "Error while processing" in done.stderr else "")
    lines = [line for line in said.splitlines() if re.search(r"(warning|error): ", line)]
    findings = [line.replace(f"{TOP}/", "") for line in lines if not excused(line)]
    if done.returncode != 0 and not lines:
        findings = [f"{name}: {' '.join(command[:1])} ended with {done.returncode}: {done.stderr.strip()[-500:]}"]
    if not findings:
        marker.touch()
    return findings


def version(program):
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def main():
    wanted = sys.argv[1:] or ["*.h", "*.cc"]
    files = subprocess.run(["git", "ls-files", *wanted], cwd=TOP, capture_output=True, text=True, check=True)
    settings = "\0".join([version(CXX), version(CLANG_TIDY), (TOP / ".clang-tidy").read_text(), *FLAGS, *WARNINGS,
                          str(sorted(EXCEPTIONS)), pathlib.Path(__file__).read_text()])
    CACHE.mkdir(parents=True, exist_ok=True)
    known, work, total = {}, [], 0
    for name in files.stdout.split():
        if not (TOP / name).is_file():
            continue
        closure = own_includes(name, known)
        if any(ELSEWHERE.search(known[file][0]) for file in closure):
            continue
        total += 1
        content = "\0".join([settings, name, *(file + "\0" + known[file][0] for file in sorted(closure))])
        marker = CACHE / hashlib.sha256(content.encode()).hexdigest()
        if not marker.exists():
            work.append((name, marker))
    findings = set()
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        for found in pool.map(lambda item: check(*item), work):
            findings.update(found)
    if total == 0:
        findings.add(f"no file matches {' '.join(wanted)}")
    print("\n".join(sorted(findings)), end="\n" if findings else "")
    print(f"static checks: {total} files, {len(work)} of them checked now, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
