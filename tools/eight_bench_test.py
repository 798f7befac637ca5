#!/usr/bin/env python3
"""What tools/eight_bench.py makes of predictions and figures."""
import json
import os
import tempfile
import unittest

import eight_bench


class EightBench(unittest.TestCase):
    def test_terms_near_their_prediction_are_left_out_and_the_largest_difference_comes_first(self):
        predicted = {"experts": 100.0, "head": 20.0, "norms": 10.0, "gone": 3.0}
        measured = {"experts": 104.0, "head": 30.0, "norms": 9.0, "new": 2.0}
        lines = eight_bench.term_lines(predicted, measured)
        self.assertEqual([line.split(":")[0].strip() for line in lines], ["head", "gone", "new", "norms"])

    def test_a_prediction_is_read_from_a_trace_of_half_the_gpus(self):
        read = 4.54e6  # bytes of 1 us
        table = [{"op": "embed", "us": 3, "bytes": 0, "parts": []},
                 {"op": "moe_norm", "us": 50, "bytes": 0, "parts": [{"what": "experts: down", "us": 30, "bytes": 20 * read}]}]
        with tempfile.TemporaryDirectory() as folder:
            trace = os.path.join(folder, "trace.json")
            with open(trace, "w", encoding="utf-8") as file:
                json.dump({"table": table}, file)
            words = ["--trace", trace, "--results", folder, "--layers", "60"]
            terms = eight_bench.Eight(eight_bench.parse(words)).predicted_terms()
        self.assertEqual(terms, {"embed, embed": 3.0, "moe_norm, experts: down": 40.0})


if __name__ == "__main__":
    unittest.main()
