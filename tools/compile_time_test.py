#!/usr/bin/env python3
"""Tests of compile_time.py: what it reads from a log of ninja."""
import unittest

from compile_time import durations

LOG = "# ninja log v5\n10\t1510\t0\ta.cu.o\tff\n20\t30\t0\tb.cc.o\tff\n0\t500\t0\tc.cu.o\tff\n2000\t2250\t0\ta.cu.o\tff\n"


class Durations(unittest.TestCase):
    def test_of_each_object_the_newest_build_counts(self):
        self.assertEqual(durations(LOG, ".cu.o"), {"a.cu.o": 0.25, "c.cu.o": 0.5})

    def test_an_empty_log_has_none(self):
        self.assertEqual(durations("# ninja log v5\n", ".cu.o"), {})


if __name__ == "__main__":
    unittest.main()
