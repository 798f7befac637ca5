#!/usr/bin/env python3
"""The arithmetic of tools/pd_bench.py."""
import unittest

import pd_bench


class OneGoodStream:
    """A server that answers prompts and the first of the streams; the other streams fail."""

    def __init__(self):
        self.streams = 0

    def stream(self, _path, body):
        if body["max_tokens"] > 1:
            self.streams += 1
            if self.streams > 1:
                raise RuntimeError("full")
        for token in range(body["max_tokens"]):
            yield {"choices": [{"token_ids": [token]}]}


class PdBench(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(pd_bench.quantile(range(100), 0.5), 50)
        self.assertEqual(pd_bench.quantile(range(100), 0.99), 99)
        self.assertEqual(pd_bench.quantile([7], 0.99), 7)

    def test_bars(self):
        one = {"first_s": 1.0, "p99_s": 0.01, "p99_loaded_s": 0.5}
        good = {"first_s": 1.054, "p99_s": 0.01, "p99_loaded_s": 0.0109}
        bad = {"first_s": 1.056, "p99_s": 0.01, "p99_loaded_s": 0.0111}
        self.assertTrue(all(line.endswith("met") for line in pd_bench.verdicts(one, good)))
        self.assertTrue(all(line.endswith("MISSED") for line in pd_bench.verdicts(one, bad)))

    def test_without_gaps_only_the_first_token_is_judged(self):
        good, bad = ([*pd_bench.verdicts({"first_s": 1.0}, {"first_s": s})] for s in (1.054, 1.056))
        self.assertEqual((len(good), len(bad)), (1, 1))
        self.assertTrue(good[0].endswith("met") and bad[0].endswith("MISSED"))

    def test_prompts_are_of_the_models_ids(self):
        self.assertLess(max(pd_bench.request(pd_bench.Prompts(1, 50), 500, 1)["prompt"]), 50)
        self.assertGreater(max(pd_bench.request(pd_bench.Prompts(1), 500, 1)["prompt"]), 100000)

    def test_a_stream_that_fails_ends_the_bench(self):
        with self.assertRaises(RuntimeError):
            pd_bench.gaps(OneGoodStream(), pd_bench.Prompts(1), 8, 4, True)


if __name__ == "__main__":
    unittest.main()
