#!/usr/bin/env python3
"""The arithmetic of tools/isa_bench.py."""
import unittest

import isa_bench


class IsaBench(unittest.TestCase):
    def test_sets_are_those_of_the_machine(self):
        self.assertEqual(isa_bench.sets_of("model : x\nflags\t\t: fpu avx2 avx512f\n"), ["avx2"])
        self.assertEqual(isa_bench.sets_of("flags : avx512_bf16 avx2 amx_bf16\nflags : avx2\n"), ["avx2", "avx512", "amx"])
        self.assertEqual(isa_bench.sets_of(""), [])

    def test_the_best_of_each_figure_counts(self):
        self.assertEqual(isa_bench.best([{"a": 1, "b": 5}, {"a": 3, "b": 4}]), {"a": 3, "b": 5})

    def test_a_set_that_is_not_there_has_a_dash(self):
        figures = {name: 1234.5 for name, _, _ in isa_bench.FIGURES}
        lines = isa_bench.table({("m", "avx2"): figures, ("n", "avx2"): figures})
        self.assertEqual(lines[0], "| tokens/s | avx2 | avx512 | amx |")
        self.assertEqual(lines[2], "| m: decode, 1 stream | 1,234 | - | - |")
        self.assertEqual(len(lines), 2 + 2 * len(isa_bench.FIGURES))


if __name__ == "__main__":
    unittest.main()
