#!/usr/bin/env python3
"""What tools/gpu_checks.py complains of: figures that miss a bar, loads ahead of a wait; part of `make test`, needs no GPU."""
import unittest

from gpu_checks import LEAST_TOKENS_S, STEPS, missed_bars
from gpu_fence import ahead_of_wait, complaints, kernels


def logged(rate=300.0, rows_us=2000.0, steps=STEPS):
    """What `perigee bench step` prints of each step, as full_size() logs it; without the tables."""
    return "".join(f"$ perigee bench step bench/models/some --device cuda --trace {' '.join(step)}\n"
                   f"median step 2000.0 us (mean 2000.0, p99 2001.0, of 200), {rate} tok/s\n\n"
                   f"The rows add up to {rows_us} us; the traced step took {rows_us} us (-0.0 %), untraced ones 2000.0 us (+0.5 %).\n"
                   for step in steps) + "$ perigee serve bench/models/some\n"


class Bars(unittest.TestCase):
    def test_figures_that_reach_all(self):
        for rows_us in (1941.0, 2000.0, 2059.0):
            self.assertEqual(missed_bars("v2-lite", logged(rows_us=rows_us)), [])

    def test_the_first_step_is_too_slow(self):
        for name, least in LEAST_TOKENS_S.items():
            self.assertEqual(missed_bars(name, logged(rate=float(least))), [])
            self.assertEqual(missed_bars(name, logged(rate=least - 0.1)),
                             [f"{' '.join(STEPS[0])}: {least - 0.1} tok/s; at least {least}"])

    def test_rows_are_no_account_of_a_step(self):
        for rows_us in (1939.0, 2061.0):
            missed = missed_bars("v2-lite", logged(rows_us=rows_us))
            self.assertEqual(len(missed), len(STEPS))
            self.assertIn(f"The rows add up to {rows_us} us", missed[0])

    def test_a_step_was_not_measured(self):
        for step in STEPS:
            missed = missed_bars("v2-lite", logged(steps=[other for other in STEPS if other is not step]))
            self.assertEqual([line.split(": ")[0] for line in missed], [" ".join(step)] * 2)

    def test_loads_ahead_of_a_wait(self):
        def code(*lines):
            sass = "\t\tFunction : some_kernel\n" + "".join(
                f"        /*{16 * i:04x}*/  {line} ;      /* 0x0 */\n            /* 0x0 */\n" for i, line in enumerate(lines))
            return next(kernels(sass))[1]

        wait, load, end = "ACQBULK", "LDG.E R2, [R4.64]", "EXIT"
        self.assertEqual(ahead_of_wait(code("S2R R0, SR_TID.X", wait, load, end)), [])
        self.assertEqual(ahead_of_wait(code(load, wait, load, end)), ["LDG.E"])
        self.assertEqual(ahead_of_wait(code("@P0 BRA 0x30", wait, "@!P1 EXIT", load, end)), ["LDG.E"])  # a branch around it
        self.assertEqual(ahead_of_wait(code("BRA 0x30", load, end, wait, "BRA 0x10")), [])  # placed after, run before
        self.assertEqual(ahead_of_wait(code("BRA.U !UP0, 0x20", wait, "UTMALDG.4D [UR8], [UR16]", end)), ["UTMALDG.4D"])
        joined = code("BSSY B0, 0x50", "@P2 BRA 0x40", wait, "BSYNC B0", "BSYNC B0", load, end)
        self.assertEqual(ahead_of_wait(joined), ["LDG.E"])
        self.assertEqual(len(complaints("some_kernel", joined)), 1)
        norm = "_ZN7perigee53_GLOBAL__N__0c_14_elementwise_cu_4f11norm_kernelILi1EEEv"
        self.assertEqual(complaints(norm, joined), [])
        self.assertEqual(len(complaints(norm, code(*[load] * 5, wait, end))), 1)
        self.assertEqual(len(complaints(norm, code("LDGSTS.E [R1], [R4.64]", wait, end))), 1)


if __name__ == "__main__":
    unittest.main()
