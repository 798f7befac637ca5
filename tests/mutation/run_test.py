#!/usr/bin/env python3
"""run.py on a toy tree: a bug that is caught, one that hangs, one that survives, and those that cannot be planted."""
import pathlib
import tempfile
import unittest

from run import (CAUGHT, HUNG, SURVIVED, UNAPPLIED, UNCOMPILED, Bug, FailsWithoutBug, Outcome, Outcomes, Runner, Step,
                 check_survivors, first_failure, plant, read_bugs, read_survivors, table, unapplied, verdict)

SOURCE = """def limit(x):
    if x > 10:
        return 10
    return x


def spare(x):
    return x
"""
FIRST = "import src.core.limit as l; assert l.limit(11) == 10"
SECOND = "import src.core.limit as l; assert l.limit(3) == 3"


def bug(name, find, replace):
    return Bug(f"core-{name}", "src/core/limit.py", "a bug", find, replace)


DROPPED = bug("dropped", "\nif x > 10:\n    return 10\n", "")
NEGATED = bug("negated", "if x > 10:\nreturn 10\nreturn x", "if x > 10:\n    return 10\nreturn -x")
ENDLESS = bug("endless", "if x > 10:", "while x > 10:\n    pass\nif x > 10:")
UNSEEN = bug("unseen", "def spare(x):", "def spare(x, y=0):")
ABSENT = bug("absent", "if x > 11:", "if x > 12:")
AMBIGUOUS = bug("ambiguous", "return x", "return 0")
BROKEN = bug("broken", "def spare(x):", "def spare(x:")


class ToyTree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name) / "tree"
        (self.tree / "src/core").mkdir(parents=True)
        self.file = self.tree / "src/core/limit.py"
        self.file.write_text(SOURCE)
        python = ["python3", "-B", "-c"]
        steps = {"core": [Step("first", ["src/core/limit.py"], [*python, FIRST]),
                          Step("second", [], [*python, SECOND])]}
        compile_all = [*python, "import ast, sys; [ast.parse(open(name).read()) for name in sys.argv[1:]]"]
        self.runner = Runner(self.tree, compile_all, steps)
        self.runner.limit_s = lambda step: 60  # a busy machine starts a program seconds late

    def outcome(self, planted):
        result = self.runner.try_one(planted)
        self.assertEqual(self.file.read_text(), SOURCE)
        return result.outcome, result.by

    def test_outcomes(self):
        self.assertEqual(self.outcome(DROPPED), (CAUGHT, "first"))
        self.assertEqual(self.outcome(NEGATED), (CAUGHT, "second"))
        self.assertEqual(self.outcome(UNSEEN), (SURVIVED, ""))
        self.assertEqual(self.outcome(ABSENT), (UNAPPLIED, ""))
        self.assertEqual(self.outcome(AMBIGUOUS), (UNAPPLIED, ""))
        self.assertEqual(self.outcome(BROKEN), (UNCOMPILED, "first"))

    def test_a_hang_counts_as_caught(self):
        self.runner.limit_s = lambda step: 0.5
        self.assertEqual(self.outcome(ENDLESS), (HUNG, "first"))

    def test_only_steps_that_are_needed_run_without_a_bug(self):
        self.outcome(DROPPED)
        self.assertEqual(set(self.runner.usual_s), {"first"})
        self.outcome(NEGATED)
        self.assertEqual(set(self.runner.usual_s), {"first", "second"})

    def test_a_step_that_fails_without_a_bug_is_named(self):
        broken = plant(NEGATED, SOURCE)
        self.file.write_text(broken)
        with self.assertRaisesRegex(FailsWithoutBug, "second fails without a bug"):
            self.runner.try_one(bug("other", "def spare(x):", "def spare(x, y=0):"))
        self.assertEqual(self.file.read_text(), broken)

    def test_the_test_that_noticed_is_named(self):
        named = f"print('[  FAILED  ] Limit.Small (1 ms)'); {SECOND}"
        self.runner.steps["core"][1] = Step("second", [], ["python3", "-B", "-c", named])
        self.assertEqual(self.outcome(NEGATED), (CAUGHT, "second Limit.Small"))

    def test_unapplied(self):
        self.assertEqual(unapplied([DROPPED, ABSENT, AMBIGUOUS], self.tree), [ABSENT, AMBIGUOUS])


class Lists(unittest.TestCase):
    def test_the_replacement_is_indented_as_what_it_replaces(self):
        self.assertIn("    while x > 10:\n        pass\n    if x > 10:\n", plant(ENDLESS, SOURCE))
        self.assertIn("\n    if x > 12:\n", plant(bug("indented", "if x > 10:", "  if x > 12:"), SOURCE))

    def test_first_failure(self):
        self.assertEqual(first_failure("x\n[  FAILED  ] A.b/0, where\n[  FAILED  ] A.c\n"), "A.b/0")
        self.assertEqual(first_failure("FAILED tests/e2e/test_api.py::test_chat - assert 1\n"),
                         "tests/e2e/test_api.py::test_chat")
        self.assertEqual(first_failure("FAILED seed 7 tick 3: a page is not free\n"), "FAILED seed 7")
        self.assertEqual(first_failure("Segmentation fault\n"), "")

    def test_ids_are_unique(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            entry = "[[bug]]\nid = 'text-1'\nfile = 'f'\nwhat = 'w'\nfind = 'x'\nreplace = ''\n"
            (folder / "one.toml").write_text(entry)
            self.assertEqual([one.id for one in read_bugs(folder)], ["text-1"])
            (folder / "two.toml").write_text(entry)
            with self.assertRaisesRegex(SystemExit, "twice: text-1"):
                read_bugs(folder)

    def test_tests_look_for_each_bug(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "one.toml").write_text("[[bug]]\nid = 'a-1'\nfile = 'f'\nwhat = 'w'\nfind = 'x'\nreplace = ''\n")
            with self.assertRaisesRegex(SystemExit, "no tests look for the bugs of a:"):
                read_bugs(folder)

    def test_outcomes_are_kept_while_the_bug_is_the_same(self):
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "outcomes.json"
            for one in (DROPPED, UNSEEN):
                Outcomes(path).put(one, Outcome(CAUGHT, "first", 1.0))
            self.assertEqual(Outcomes(path).get(DROPPED), Outcome(CAUGHT, "first", 1.0))
            self.assertIsNone(Outcomes(path).get(DROPPED._replace(replace="pass")))
            known = Outcomes(path)
            known.forget([DROPPED])
            self.assertIsNone(known.get(DROPPED))
            self.assertTrue(known.caught(UNSEEN))
            known.put(UNSEEN, Outcome(SURVIVED, "", 1.0))
            self.assertFalse(known.caught(UNSEEN))

    def test_verdict(self):
        caught, survived = Outcome(CAUGHT, "first", 1), Outcome(SURVIVED, "", 1)
        bugs = [DROPPED._replace(id=f"core-{i}") for i in range(20)]
        results = {one.id: caught for one in bugs}
        self.assertEqual(verdict(bugs, results, {}), 0)
        results["core-3"] = survived
        self.assertEqual(verdict(bugs, results, {}), 0)
        results["core-4"] = survived
        self.assertEqual(verdict(bugs, results, {}), 1)
        self.assertEqual(verdict(bugs, results, {"core-3": "known"}), 0)
        results["core-4"] = Outcome(UNAPPLIED, "", 0)
        self.assertEqual(verdict(bugs, results, {}), 1)

    def test_the_list_of_survivors_is_short_and_names_bugs(self):
        bugs = [DROPPED._replace(id=f"core-{i}") for i in range(20)]
        self.assertIsNone(check_survivors(bugs, {"core-1": "why"}))
        self.assertIn("more than 5 %", check_survivors(bugs, {"core-1": "why", "core-2": "why"}))
        self.assertIn("core-77", check_survivors(bugs, {"core-77": "why"}))

    def test_a_survivor_is_named_with_its_reason(self):
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "survivors"
            path.write_text("# why nothing notices them\ncore-unseen: only a clock could see it\n")
            text = table([UNSEEN, DROPPED], {"core-unseen": Outcome(SURVIVED, "", 2), "core-dropped": Outcome(CAUGHT, "first", 1)},
                         read_survivors(path), "2 bugs")
        self.assertIn("a bug: only a clock could see it", text)
        self.assertRegex(text, r"core +2 +1 +0 +1\n")


if __name__ == "__main__":
    unittest.main()
