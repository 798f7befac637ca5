#!/usr/bin/env python3
"""The arithmetic of tools/pd_bench.py."""
import unittest

import pd_bench


class PdBench(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(pd_bench.quantile(range(100), 0.5), 50)
        self.assertEqual(pd_bench.quantile(range(100), 0.99), 99)
        self.assertEqual(pd_bench.quantile([7], 0.99), 7)

    def test_bars(self):
        one = {"first_s": 1.0, "p99_s": 0.01, "p99_loaded_s": 0.5}
        good = {"first_s": 1.05, "p99_s": 0.01, "p99_loaded_s": 0.011}
        bad = {"first_s": 1.1, "p99_s": 0.01, "p99_loaded_s": 0.012}
        self.assertTrue(all(line.endswith("met") for line in pd_bench.verdicts(one, good)))
        self.assertTrue(all(line.endswith("MISSED") for line in pd_bench.verdicts(one, bad)))


if __name__ == "__main__":
    unittest.main()
