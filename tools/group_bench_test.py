#!/usr/bin/env python3
"""The arithmetic of tools/group_bench.py."""
import unittest

import group_bench


class GroupBench(unittest.TestCase):
    def test_the_faster_form_counts(self):
        text = ("sum+norm chosen [1, 7168]                       3.50 us      8.2 GB/s\n"
                "sum, then norm, chosen [1, 7168]                4.87 us      5.9 GB/s\n"
                "sum+norm chosen [16, 7168]                      1.00 us     77.7 GB/s\n")
        self.assertEqual(group_bench.best_sum_norm(text, 1), 3.5)
        self.assertIsNone(group_bench.best_sum_norm(text, 64))

    def test_a_bar_is_met_within_3_percent(self):
        self.assertTrue(group_bench.met(524, 540))
        self.assertFalse(group_bench.met(523, 540))
        self.assertTrue(group_bench.met(4.6, 4.5, most=True))
        self.assertFalse(group_bench.met(4.7, 4.5, most=True))

    def test_layers_are_scaled_and_what_ranks_divide_is_halved(self):
        read = 4.54e6  # 1 us
        table = [{"op": "embed", "us": 3, "bytes": 0, "parts": []},
                 {"op": "moe_norm", "us": 50, "bytes": 0, "parts": [{"what": "experts: down", "us": 30, "bytes": 20 * read},
                                                                    {"what": "router", "us": 20, "bytes": 10 * read}]},
                 {"op": "linear 7168 -> 40960", "us": 40, "bytes": 0, "parts": [{"what": "product", "us": 40, "bytes": 30 * read}]},
                 {"op": "waiting for other ranks", "us": 7, "bytes": 0, "parts": []}]
        lines, total = group_bench.of_whole_model(group_bench.layer_terms(table), 60, 30)
        self.assertEqual(len(lines), 4)
        self.assertAlmostEqual(total, 3 + 2 * (30 - 10) + 2 * 20 + (40 - 15))


if __name__ == "__main__":
    unittest.main()
