#!/usr/bin/env python3
"""The arithmetic of tools/draft_bench.py."""
import unittest

import draft_bench


class DraftBench(unittest.TestCase):
    def test_an_op_takes_as_much_longer_as_it_reads_more(self):
        plain = [{"op": "moe", "us": 100, "bytes": 8}, {"op": "mla_attend", "us": 7, "bytes": 10}, {"op": "gaps", "us": 20, "bytes": 0}]
        drafting = [{"op": "moe", "us": 400, "bytes": 24}, {"op": "mla_attend", "us": 9, "bytes": 9},
                    {"op": "gaps", "us": 90, "bytes": 0}, {"op": "linear 6 -> 2", "us": 5, "bytes": 12}]
        self.assertAlmostEqual(draft_bench.predicted_us(plain, drafting), 300 + 7 + 20 + 5)

    def test_gaps_are_those_of_the_table(self):
        self.assertEqual(draft_bench.gaps_us([{"op": "gaps", "us": 20}, {"op": "moe", "us": 3}]), 20)
        self.assertEqual(draft_bench.gaps_us([]), 0)


if __name__ == "__main__":
    unittest.main()
