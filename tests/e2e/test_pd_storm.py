"""A storm through router, prefill and decode server: the storm of test_storm.py, on caches too small for it.

PERIGEE_SOAK makes it 2,000 requests instead of 192.
"""
import concurrent.futures
import os
import random
import time

from conftest import FLAGS, FOLDER, PROGRAM, gauge, wait_idle
from server_process import PairProcess
from test_pd import counts, wait_let_go
from test_storm import CACHE_MIB, CLIENTS, DEADLINE, MODEL, SOAK, cut_short, make_crowd, make_job, streamed, whole

NUM_REQUESTS, NUM_COMPARED = (2000, 2000) if SOAK else (192, 24)


def test_storm_through_a_pair(server, tmp_path, capsys):
    rng = random.Random(12)
    shared = [[rng.randrange(2048) for _ in range(260)] for _ in range(NUM_REQUESTS // 12)]
    jobs = [make_job(rng, rng.choice(shared)) for _ in range(NUM_REQUESTS)]
    jobs[0] = make_crowd(rng)
    # Pages that wait for imports keep some of them from starting at first; outputs of this length still run together later.
    jobs[0][0]["max_tokens"] = 600

    def run(pair, job):
        body, cut_after = job
        if cut_after is not None:
            return cut_short(pair, body, cut_after)
        return streamed(pair, body) if body["stream"] else whole(pair, body)

    flags = [*FLAGS, "--deterministic", "--selfcheck", "--threads", "1", "--max-num-seqs", "64", "--max-num-batched-tokens", "512",
             "--kv-cache-memory-bytes", str(CACHE_MIB * 2**20)]
    begin = time.monotonic()
    with PairProcess(PROGRAM, FOLDER, flags, log_folder=str(tmp_path)) as pair, concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda job: run(pair, job), jobs))
        wait_let_go(pair, 60)
        storm_s = time.monotonic() - begin
        seen = counts(pair)
        assert seen["failed"] == 0 and seen["arrived"] > 0, seen
        preemptions, withdrawn = (gauge(pair.decode.get("/metrics")[1], name)
                                  for name in ("vllm:num_preemptions_total", "perigee:kv_transfers_withdrawn_total"))
        finished = [index for index, ids in enumerate(together) if ids not in (None, DEADLINE)]
        for index in rng.sample(finished, min(NUM_COMPARED, len(finished))):
            body = {key: value for key, value in jobs[index][0].items() if key != "timeout"}
            assert whole(server, body) == together[index], f"request {index} differs on one server: {body}"
        assert all(wait_idle(each) for each in pair.servers())
    assert preemptions > 0, "the cache was meant to be too small"
    with capsys.disabled():
        print(f"\nstorm on {MODEL} through a pair: {NUM_REQUESTS} requests of {CLIENTS} clients in {storm_s:.0f} s, "
              f"{together.count(None)} cut by the client, {together.count(DEADLINE)} by their deadline, {seen['arrived']:.0f} prompts sent, "
              f"{withdrawn:.0f} withdrawn and computed by the decode server, "
              f"{preemptions:.0f} preemptions; {min(NUM_COMPARED, len(finished))} replies equal to one server's")
