#!/usr/bin/env python3
"""Plants the bugs of bugs/*.toml one at a time in a copy of the tree and sees which tests notice. See README.md.

    run.py --check                    each bug applies to the sources as they are; plants nothing
    run.py                            all of them
    run.py --sample 15 --seed 7       so many, chosen by the seed
    run.py --ids text-03,exec-12      these: builds and runs only the tests that look for them, until one notices
    run.py --folder text --resume     a folder, without those that build-mutation/outcomes.json has as caught

The results of all go to results.txt. Exit code 1: a bug does not apply or compile, the tests fail without a bug, or over 5 %
of those planted survived without being named in `survivors`. Standard library only.
"""
import argparse
import collections
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
WORK = TOP / "build-mutation"
TREE = WORK / "tree"  # with its build folder inside, as elsewhere: so a compiler cache serves both
LEAST_CAUGHT = 0.95
NO_PROGRAM = ("docs/", "tests/mutation/")  # what is in no test
CAUGHT, HUNG, SURVIVED, UNCOMPILED, UNAPPLIED = "caught", "hung", "survived", "does not compile", "does not apply"

Bug = collections.namedtuple("Bug", "id file what find replace")
# A step of the search: `targets` are built, then `command` is run in the tree; it notices the bug when it fails.
Step = collections.namedtuple("Step", "name targets command")
Outcome = collections.namedtuple("Outcome", "outcome by seconds")


class FailsWithoutBug(Exception):
    """The step that does, with what it printed."""


def unit(folder, *patterns, within="src"):
    name = f"{folder.replace('/', '_')}_test"
    return Step(name, [name], ["tools/run_tests", f"{{build}}/{within}/{folder}/{name}", *(patterns or ["*"])])


ENGINE = unit("engine")
SIM = Step("sim", ["sim"], ["{build}/tests/sim/sim", "--seeds", "200"])
SIM_DCP = Step("sim_dcp", ["sim"], [*SIM.command, "--ranks", "2", "--drafts", "3", "--dcp", "8"])
PD_SIM = Step("pd_sim", ["pd_sim"], ["{build}/tests/sim/pd/pd_sim", "--seeds", "600"])
EQUALITY = unit("equality", "EngineEnds.*", "EqualityOfDeterministic.*", "Equality.CachedAsCold*", "Equality.ANextTurn*",
                "EqualityOfLatentAttention.*", within="tests")
CONSTRAINTS = unit("equality", "Constraints.*", within="tests")._replace(name="equality of constraints")
HANDOVERS = unit("equality", "*HandoverEquality.WhatIsNotTheSameIsNotRead*", "*HandoverEquality.DraftsAreAccepted*TinyK2",
                 within="tests")._replace(name="equality of handovers")
RANKS = unit("equality", "*TensorParallelOnRef*", "*ContextParallelOnRef*", "WholeDrafts.*", within="tests")._replace(name="equality of ranks")
GOLDEN = unit("golden", "*.Ref/*", "*_avx2", "*kimi_linear*", within="tests")
CONFORMANCE = unit("conformance", within="tests")
SERVER = unit("server")
E2E = Step("e2e", ["perigee"], [".venv/bin/python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                                "tests/e2e/test_api.py", "tests/e2e/test_operation.py"])

# Which tests look for a bug of a folder (the part of its id before the number): the fast ones first, the next only
# where these saw nothing.
STEPS = {
    "control": [unit("control"), SIM, SIM_DCP, ENGINE, EQUALITY, CONSTRAINTS],
    "engine": [ENGINE, SERVER, HANDOVERS, EQUALITY, RANKS, E2E],
    "kv": [unit("kv"), PD_SIM, RANKS],
    "pd": [PD_SIM],
    "exec": [unit("exec"), ENGINE, EQUALITY, CONSTRAINTS, RANKS],
    "model": [unit("model"), unit("base"), GOLDEN, E2E],
    "text": [unit("text"), unit("base"), SERVER],
    "grammar": [unit("grammar")],
    "server": [SERVER, E2E],
    "router": [unit("router"), E2E],
    "base": [unit("base"), unit("text"), SERVER],
    "cpu": [unit("ops/cpu"), CONFORMANCE, GOLDEN, EQUALITY],
    "ops": [unit("ops"), CONFORMANCE, RANKS, GOLDEN, EQUALITY],
    "comm": [unit("comm"), ENGINE, RANKS],
    "profile": [unit("profile"), unit("main")],
}


def folder_of(bug):
    """The part of the program that a bug belongs to: what its id begins with, wherever its source lies by now."""
    return bug.id.rsplit("-", 1)[0]


def read_bugs(folder):
    bugs = []
    for path in sorted(folder.glob("*.toml")):
        with open(path, "rb") as file:
            bugs += [Bug(**entry) for entry in tomllib.load(file)["bug"]]
    if homeless := sorted({folder_of(bug) for bug in bugs} - set(STEPS)):
        raise SystemExit(f"{folder}: no tests look for the bugs of {', '.join(homeless)}: add to STEPS")
    twice = [id for id, count in collections.Counter(bug.id for bug in bugs).items() if count > 1]
    if twice:
        raise SystemExit(f"{folder}: ids occur twice: {', '.join(twice)}")
    return bugs


def plant(bug, source):
    """The source with the bug in it; None when its lines do not occur exactly once. How they are indented is free."""
    lines = source.split("\n")
    bare = [line.strip() for line in lines]
    find = [line.strip() for line in bug.find.strip("\n").split("\n")]
    places = [i for i in range(len(bare) - len(find) + 1) if bare[i:i + len(find)] == find]
    if len(places) != 1:
        return None
    at = places[0]
    indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
    replacement = [indent + line for line in textwrap.dedent(bug.replace.strip("\n")).split("\n") if line]
    return "\n".join(lines[:at] + replacement + lines[at + len(find):])


def unapplied(bugs, tree):
    out = []
    for bug in bugs:
        path = tree / bug.file
        if not path.exists() or plant(bug, path.read_text(encoding="utf-8")) is None:
            out.append(bug)
    return out


def copy_tree(source, target):
    """Brings `target` to the tracked files of `source` as they lie there; the names of those that were unlike before.
    What is equal stays untouched."""
    changed = set()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=source, capture_output=True, check=True).stdout.decode()
    wanted = {name for name in names.split("\0") if name and (source / name).is_file()}
    for name in wanted:
        old, new = target / name, source / name
        data = new.read_bytes()
        if old.exists() and old.read_bytes() == data:
            continue
        old.parent.mkdir(parents=True, exist_ok=True)
        changed.add(name)
        old.write_bytes(data)
        old.chmod(new.stat().st_mode)
    for folder in {name.split("/")[0] for name in wanted if "/" in name}:
        for path in (target / folder).rglob("*"):
            if path.is_file() and str(path.relative_to(target)) not in wanted:
                changed.add(str(path.relative_to(target)))
                path.unlink()
    if (source / ".venv").exists() and not (target / ".venv").exists():
        (target / ".venv").symlink_to((source / ".venv").resolve())
    return changed


def first_failure(output):
    """Which test failed first, as gtest, pytest and the simulator print it; "" where the program ended otherwise."""
    found = re.search(r"\[  FAILED  \] ([\w./]+)|^(FAILED seed \d+)|^FAILED (\S+)", output, re.MULTILINE)
    return next(filter(None, found.groups())) if found else ""


class Runner:
    """Builds and tests one tree. `build` is the command that builds targets, which are appended to it."""

    def __init__(self, tree, build, steps, prefix=(), environment=None):
        self.tree, self.build_command, self.steps, self.prefix = tree, list(build), steps, list(prefix)
        self.environment = dict(os.environ, **(environment or {}))
        self.usual_s = {}  # of a step without a bug

    def run(self, command, timeout_s, output=subprocess.DEVNULL):
        """The exit code; None when the time was up. What it started goes with it."""
        process = subprocess.Popen(self.prefix + command, cwd=self.tree, env=self.environment, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def build(self, targets, show=False):
        output = None if show else subprocess.DEVNULL
        return not targets or self.run(self.build_command + list(targets), 3600, output) == 0

    def test(self, step, timeout_s):
        """The exit code or None, and what was printed."""
        with tempfile.TemporaryFile() as output:
            code = self.run([word.format(build=self.tree / "build") for word in step.command], timeout_s, output)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def measure(self, step):
        """Runs a step without a bug, for its first one. If it fails then it could not tell anything. Returns the seconds
        that this took."""
        start = time.monotonic()
        built = self.build(step.targets, show=True)
        begin = time.monotonic()
        code, output = self.test(step, 1800) if built else (1, "")
        if code != 0:
            raise FailsWithoutBug(f"{step.name} fails without a bug:\n{output}")
        self.usual_s[step.name] = time.monotonic() - begin
        print(f"without a bug: {step.name} {self.usual_s[step.name]:.1f} s", flush=True)
        return time.monotonic() - start

    def limit_s(self, step):
        return 60 + 6 * self.usual_s.get(step.name, 60)

    def try_one(self, bug):
        path = self.tree / bug.file
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        planted = plant(bug, before)
        begin = time.monotonic()
        if planted is None:
            return Outcome(UNAPPLIED, "", 0)
        try:
            for step in self.steps[folder_of(bug)]:
                if step.name not in self.usual_s:
                    path.write_text(before, encoding="utf-8")
                    begin += self.measure(step)
                if path.read_text(encoding="utf-8") != planted:
                    path.write_text(planted, encoding="utf-8")
                if not self.build(step.targets):
                    return Outcome(UNCOMPILED, step.name, time.monotonic() - begin)
                code, output = self.test(step, self.limit_s(step))
                if code != 0:
                    by = f"{step.name} {first_failure(output)}".strip()
                    return Outcome(HUNG if code is None else CAUGHT, by, time.monotonic() - begin)
            return Outcome(SURVIVED, "", time.monotonic() - begin)
        finally:
            path.write_text(before, encoding="utf-8")


def read_survivors(path):
    """id -> why nothing notices it."""
    if not path.exists():
        return {}
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {id.strip(): why.strip() for id, why in (line.split(":", 1) for line in lines if line)}


def fingerprint(bug):
    return hashlib.sha256("\0".join(bug).encode()).hexdigest()[:16]


class Outcomes:
    """What is known, kept in a file so that a run can go on where another ended."""

    def __init__(self, path):
        self.path = path
        self.known = json.loads(path.read_text()) if path.exists() else {}

    def forget(self, bugs):
        for bug in bugs:
            self.known.pop(bug.id, None)

    def get(self, bug):
        entry = self.known.get(bug.id)
        return Outcome(*entry[1:]) if entry and entry[0] == fingerprint(bug) else None

    def caught(self, bug):
        outcome = self.get(bug)
        return outcome is not None and outcome.outcome in (CAUGHT, HUNG)

    def put(self, bug, outcome):
        self.known[bug.id] = [fingerprint(bug), *outcome]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=1))


def table(bugs, results, survivors, head):
    lines = [head, ""]
    by_folder = {}
    for bug in bugs:
        by_folder.setdefault(folder_of(bug), []).append(results[bug.id])
    by_folder["all"] = [results[bug.id] for bug in bugs]
    lines.append(f"{'folder':<10}{'planted':>8}{'caught':>8}{'of them hung':>14}{'survived':>10}")
    for folder, outcomes in by_folder.items():
        count = collections.Counter(outcome.outcome for outcome in outcomes)
        caught = count[CAUGHT] + count[HUNG]
        lines.append(f"{folder:<10}{len(outcomes):>8}{caught:>8}{count[HUNG]:>14}{count[SURVIVED]:>10}")
    lines.append("")
    for bug in bugs:
        outcome = results[bug.id]
        by = f" by {outcome.by}" if outcome.outcome in (CAUGHT, HUNG) else ""
        lines.append(f"{bug.id:<12} {outcome.outcome}{by}, {outcome.seconds:.0f} s")
        if outcome.outcome == SURVIVED:
            lines.append(f"{'':<12} {bug.what}: {survivors.get(bug.id, 'no reason given in survivors')}")
    return "\n".join(lines) + "\n"


def verdict(bugs, results, survivors):
    """0 when every bug could be planted, and enough were caught; that those in `survivors` are not is known."""
    count = collections.Counter(results[bug.id].outcome for bug in bugs)
    if count[UNAPPLIED] or count[UNCOMPILED]:
        print(f"{count[UNAPPLIED]} bugs do not apply, {count[UNCOMPILED]} do not compile: bring them up to date")
        return 1
    caught = count[CAUGHT] + count[HUNG]
    new = [bug.id for bug in bugs if results[bug.id].outcome == SURVIVED and bug.id not in survivors]
    print(f"mutation: {caught} of {len(bugs)} planted bugs caught ({100 * caught / len(bugs):.1f} %), "
          f"{len(new)} survived that are not in the list of survivors: {', '.join(new) or 'none'}")
    return 0 if len(bugs) - len(new) >= LEAST_CAUGHT * len(bugs) else 1


def check_survivors(bugs, survivors):
    """What is wrong with the list of survivors, or nothing."""
    unknown = set(survivors) - {bug.id for bug in bugs}
    if unknown:
        return f"survivors: no such bug: {', '.join(sorted(unknown))}"
    if len(survivors) > (1 - LEAST_CAUGHT) * len(bugs):
        return f"survivors: {len(survivors)} are more than 5 % of {len(bugs)}: write tests"
    return None


def choose(bugs, options):
    if options.ids:
        wanted = options.ids.split(",")
        unknown = set(wanted) - {bug.id for bug in bugs}
        if unknown:
            raise SystemExit(f"no such bug: {', '.join(sorted(unknown))}")
        bugs = [bug for bug in bugs if bug.id in wanted]
    if options.folder:
        bugs = [bug for bug in bugs if folder_of(bug) in options.folder.split(",")]
    if options.sample:
        chosen = set(random.Random(options.seed).sample([bug.id for bug in bugs], min(options.sample, len(bugs))))
        bugs = [bug for bug in bugs if bug.id in chosen]
    return bugs


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only see that each bug applies")
    parser.add_argument("--sample", type=int, help="plant so many, chosen by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ids", help="plant these, separated by commas")
    parser.add_argument("--folder", help="plant those of these folders, separated by commas")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes of an earlier run")
    parser.add_argument("--steps", type=int, default=99, help="stop looking after so many steps of a folder")
    parser.add_argument("--minutes", type=float, help="begin no bug after so long; go on with --resume (exit code 3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--prefix", default="", help="before each command that builds or tests, such as 'nice'")
    parser.add_argument("--results", help="where they go; those of all bugs to results.txt, of some to build-mutation")
    return parser.parse_args(arguments)


def configure():
    TREE.mkdir(parents=True, exist_ok=True)
    changed = copy_tree(TOP, TREE)
    subprocess.run(["cmake", "-S", str(TREE), "-B", str(TREE / "build"), "-G", "Ninja", "-DPERIGEE_CUDA=OFF",
                    "-DCMAKE_BUILD_TYPE=Release"], check=True, stdout=subprocess.DEVNULL)
    return changed


def main(arguments):
    options = parse_options(arguments)
    every = read_bugs(HERE / "bugs")
    bugs = choose(every, options)
    survivors = read_survivors(HERE / "survivors")
    if wrong := check_survivors(every, survivors):
        print(wrong)
        return 1
    rotten = unapplied(bugs, TOP)
    for bug in rotten:
        print(f"{bug.id}: its lines do not occur exactly once in {bug.file}")
    if options.check or rotten:
        print(f"mutation: {len(bugs) - len(rotten)} of {len(bugs)} bugs apply")
        return 1 if rotten else 0
    WORK.mkdir(exist_ok=True)
    lock = open(WORK / "lock", "w", encoding="utf-8")  # as long as the process
    fcntl.flock(lock, fcntl.LOCK_EX)  # a run that works in this tree ends first
    begin = time.monotonic()
    changed = configure()
    steps = {folder: steps[:options.steps] for folder, steps in STEPS.items()}
    runner = Runner(TREE, ["cmake", "--build", "build", f"-j{options.jobs}", "--target"], steps,
                    shlex.split(options.prefix), {"PERIGEE_PROGRAM": str(TREE / "build" / "perigee"), "GTEST_FAIL_FAST": "1"})
    outcomes = Outcomes(WORK / "outcomes.json")
    if not options.resume:
        outcomes.forget(bugs)
    todo = [bug for bug in bugs if not outcomes.caught(bug)]  # a survivor again: there may be new tests, or more steps
    usual = WORK / "usual.json"  # of this very tree
    if any(not name.startswith(NO_PROGRAM) for name in changed):
        usual.unlink(missing_ok=True)
    if usual.exists():
        runner.usual_s = json.loads(usual.read_text())
    for bug in todo:
        if options.minutes and time.monotonic() - begin > 60 * options.minutes:
            return 3
        try:
            outcome = runner.try_one(bug)
        except FailsWithoutBug as failure:
            print(failure)
            return 1
        finally:
            usual.write_text(json.dumps(runner.usual_s))
        outcomes.put(bug, outcome)
        print(f"{bug.id:<12} {outcome.outcome:<17} {outcome.seconds:6.1f} s  {bug.what}: {outcome.by}", flush=True)
    results = {bug.id: outcomes.get(bug) for bug in bugs}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=TOP, capture_output=True, text=True).stdout
    head = f"{len(bugs)} planted bugs at {commit.strip()}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    path = options.results or (HERE if len(bugs) == len(every) else WORK) / "results.txt"
    pathlib.Path(path).write_text(table(bugs, results, survivors, head), encoding="utf-8")
    return verdict(bugs, results, survivors)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`: no bug and no process stays
    sys.exit(main(sys.argv[1:]))
