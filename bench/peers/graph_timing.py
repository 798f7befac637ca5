"""Timing of CUDA work for the peers here, as cuda_timing.h times ours: a captured graph of calls, replayed."""
import time

import torch

REPLAYS = 11
WAKE_S = 0.3  # an idle GPU takes so long to reach its clock


def time_us(calls):
    """Median microseconds of one of the calls, captured one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    start = time.monotonic()
    while time.monotonic() < start + WAKE_S:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for i in range(REPLAYS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    del kept
    return sorted(times)[REPLAYS // 2] * 1e3 / len(calls)
