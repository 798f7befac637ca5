#!/usr/bin/env python3
"""The lint that knows this project: include directions, sizes, banned words, unbuilt tests, dead paths in documents.

`make lint` runs it over the tracked files; each finding is one line `file:line: what and why`. Exceptions are listed
here, each with its reason, never in the files themselves.
"""
import os
import re
import subprocess
import sys

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAX_HEADER, MAX_SOURCE, MAX_FUNCTION, MAX_INCLUDES, MAX_COLUMNS = 200, 600, 70, 15, 120
MAX_TREE_BYTES = 52 << 20
HEADERS = (".h", ".cuh")
SOURCES = (".h", ".cuh", ".cc", ".cu")

# Brain headers that the hands may read: plain values.
VALUES = {"control/plan.h", "control/plan_ids.h", "control/plan_limits.h", "control/sampling.h", "control/topology.h"}

# (folder, module) -> all that the folder may include of it, except in the file that joins the two.
DOORS = {("server", "engine"): ("engine/messages.h", "src/server/server.cc")}

# Words that say a folder knows what it must not know.
BANNED = {
    "src/control/": r"\b(cuda|kernel|thread|mutex|std::chrono|getenv)\b",
    "src/model/": r"\b(cuda|avx512|request)\b",
    "src/": r"\b(assert|std::regex|alloca|random_device)\s*\(|\bstd::regex\b|\bFIXME\b|\bXXX\b|\bHACK\b",
}
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Third-party headers stand only here (std, POSIX and fmt/core.h, which formats messages, are free everywhere).
THIRD_PARTY = re.compile(r"#include <(boost|fmt(?!/core\.h>)|CLI|yaml-cpp|prometheus|openssl|xxhash|unicode|gtest|gmock)[/.]")
THIRD_PARTY_HOMES = ("src/base/json.cc", "src/control/prefix_index.cc", "src/kv/", "src/server/", "src/router/", "src/main/")

# (file, rule) -> reason
EXCEPTIONS = {
    ("tools/tidy.py", "marker"): "names the markers it looks for",
}


def tracked():
    out = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, check=True).stdout
    return [name for name in out.decode().split("\0") if name and os.path.exists(os.path.join(TOP, name))]


def read(name):
    with open(os.path.join(TOP, name), encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


def links_of(name, line):
    """The files and folders of this tree that a line of Markdown links to, relative to the tree."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", line)
    return [os.path.normpath(os.path.join(os.path.dirname(name), target)) for target in targets if "://" not in target]


class Tidy:
    def __init__(self):
        self.files = tracked()
        self.findings = []
        self.modules = self.read_modules()

    def report(self, name, line, rule, text):
        if (name, rule) not in EXCEPTIONS:
            self.findings.append(f"{name}:{line}: {text}")

    def read_modules(self):
        """folder -> names it may include, from the perigee_module lines."""
        modules = {}
        for name in self.files:
            if not name.startswith("src/") or not name.endswith("CMakeLists.txt"):
                continue
            for match in re.finditer(r"perigee_module\((\w+)([^)]*)\)", "\n".join(read(name))):
                words = match.group(2).split()
                deps, on = set(), False
                for word in words:
                    if word.isupper() and word.isalpha():
                        on = word == "DEPS"
                    elif on:
                        deps.add(word)
                modules[os.path.dirname(name)[4:]] = deps
        return modules

    def module_of(self, folder):
        """The module that a folder under src belongs to: itself, or the one that it is a room of."""
        while folder and folder not in self.modules:
            folder = os.path.dirname(folder)
        return folder

    def check_includes(self, name, lines):
        folder = self.module_of(os.path.dirname(name)[4:])
        allowed = self.modules.get(folder)
        own = 0
        for number, line in enumerate(lines, 1):
            tests = name.endswith(("_test.cc", "_testing.h"))
            if THIRD_PARTY.search(line) and not tests and not name.startswith(THIRD_PARTY_HOMES):
                self.report(name, number, "third-party", "third-party header outside its home")
            match = re.match(r'#include "([^"]+)"', line)
            if not match:
                continue
            own += 1
            target = match.group(1)
            home = self.module_of(os.path.dirname(target))
            door, joint = DOORS.get((folder, home), (target, None))
            if target != door and name != joint and not name.endswith("_test.cc"):
                self.report(name, number, "include", f"{folder} may include of {home} only {door}")
            if home in (folder, "base") or allowed is None or name.endswith("_test.cc"):
                continue
            if not any(home == dep or home == dep.replace("_", "/") for dep in allowed) and not (
                    "values" in allowed and target in VALUES):
                self.report(name, number, "include", f"{folder} may not include {target} (its DEPS: {' '.join(sorted(allowed))})")
        if own > MAX_INCLUDES:
            self.report(name, 1, "includes", f"{own} includes of our own, the limit is {MAX_INCLUDES}")

    def check_sizes(self, name, lines):
        limit = MAX_HEADER if name.endswith(HEADERS) else MAX_SOURCE
        if len(lines) > limit:
            self.report(name, 1, "size", f"{len(lines)} lines, the limit is {limit}")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS and "http" not in line and 'R"' not in line:
                self.report(name, number, "columns", f"{len(line)} columns, the limit is {MAX_COLUMNS}")

    def check_functions(self, name, lines):
        """A function: a line at the namespace's level that ends in '{' with a ')' before it, up to the '}' in column 0."""
        start = None
        for number, line in enumerate(lines, 1):
            if start is None and re.match(r"^[A-Za-z~].*\)[^;]*\{\s*$", line) and not line.startswith(("namespace", "struct", "class", "enum", "extern")):
                start = number
            elif start is None and re.match(r"^\s{4,}.*\)[^;]*\{\s*$", line) and number > 1 and re.match(r"^[A-Za-z].*\([^)]*$", lines[number - 2]):
                start = number - 1
            elif start is not None and line.startswith("}"):
                if number - start + 1 > MAX_FUNCTION:
                    self.report(name, start, "function", f"function of {number - start + 1} lines, the limit is {MAX_FUNCTION}")
                start = None

    def check_words(self, name, lines):
        for folder, pattern in BANNED.items():
            if not name.startswith(folder):
                continue
            for number, line in enumerate(lines, 1):
                code = line.split("//")[0]
                if re.search(pattern, code):
                    self.report(name, number, "word", f"banned in {folder}: {re.search(pattern, code).group(0).strip()}")

    def check_markers(self, name, lines):
        for number, line in enumerate(lines, 1):
            if MARKERS.search(line):
                self.report(name, number, "marker", "leftover marker")

    def check_header(self, name, lines):
        if "#pragma once" not in lines[:60]:
            self.report(name, 1, "pragma", "no #pragma once")
        if not lines or not lines[0].startswith("//"):
            self.report(name, 1, "purpose", "a header starts with a paragraph of purpose")

    def check_tests_built(self):
        for name in self.files:
            if name.endswith("_test.cc") and name.startswith("src/"):
                if not self.module_of(os.path.dirname(name)[4:]):
                    self.report(name, 1, "unbuilt", "a test in a folder that is no perigee_module")
            if name.startswith("tests/") and name.endswith(".cc"):
                folder = os.path.dirname(name)
                if f"{folder}/CMakeLists.txt" not in self.files:
                    self.report(name, 1, "unbuilt", "no CMakeLists.txt builds this")

    def check_documents(self):
        known, linked = set(self.files), {}
        folders = {os.path.dirname(name) for name in self.files}
        folders |= {parent for folder in folders for parent in (folder.rsplit("/", k)[0] for k in range(1, folder.count("/") + 1))}
        for name in self.files:
            if not name.endswith(".md"):
                continue
            for number, line in enumerate(read(name), 1):
                for path in re.findall(r"`((?:src|tests|tools|docs|bench|models|cmake)/[\w./-]+)`", line):
                    clean = path.rstrip("/")
                    if clean not in known and clean not in folders and not self.generated(clean):
                        self.report(name, number, "dead-path", f"{path} does not exist")
                for path in links_of(name, line):
                    if path not in known and path not in folders:
                        self.report(name, number, "dead-link", f"{path} does not exist")
                    linked.setdefault(name, set()).add(path)
        reached, new = set(), {"README.md"}
        while new:
            reached |= new
            new = {path for name in new for path in linked.get(name, ()) if path.endswith(".md")} - reached
        for name in sorted(known - reached):
            if name.startswith("docs/") and name.endswith(".md") and not name.startswith("docs/adr/"):
                self.report(name, 1, "unlinked", "no chain of links from README.md leads here")

    @staticmethod
    def generated(path):
        return path.startswith("build")

    def check_tree(self):
        total = sum(os.path.getsize(os.path.join(TOP, name)) for name in self.files)
        if total > MAX_TREE_BYTES:
            self.findings.append(f"tracked tree of {total} bytes, the limit is {MAX_TREE_BYTES}")

    def run(self):
        for name in self.files:
            if name.endswith((".py", ".sh", ".md", ".cmake")) or os.path.basename(name) in ("Makefile", "CMakeLists.txt"):
                lines = read(name)
                self.check_markers(name, lines)
            if name.endswith(SOURCES):
                lines = read(name)
                self.check_markers(name, lines)
                self.check_sizes(name, lines)
                self.check_functions(name, lines)
                self.check_words(name, lines)
            if name.startswith("src/") and name.endswith(SOURCES):
                self.check_includes(name, lines)
            if name.startswith("src/") and name.endswith(HEADERS):
                self.check_header(name, lines)
            if name == "Makefile" and len(lines) > 60:
                self.report(name, 1, "size", "the Makefile stays under 60 lines")
        self.check_tests_built()
        self.check_documents()
        self.check_tree()
        for finding in self.findings:
            print(finding)
        print(f"tidy: {len(self.files)} files, {len(self.findings)} findings")
        return 1 if self.findings else 0


if __name__ == "__main__":
    sys.exit(Tidy().run())
