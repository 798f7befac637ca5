"""One served model for the whole run (PERIGEE_MODEL, else tiny-k2); tests that need other flags start their own server.

PERIGEE_PROGRAM is the program, PERIGEE_FLAGS are flags that every server gets, such as "--device cuda", before its own.
"""
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tools"))

from server_process import ServerProcess  # noqa: E402

# A small cache: several servers run at once.
FLAGS = os.environ.get("PERIGEE_FLAGS", "--device cpu --kv-cache-memory-bytes 128M").split()
PROGRAM = os.environ.get("PERIGEE_PROGRAM", str(TOP / "build" / "perigee"))
FOLDER = str((TOP / os.environ.get("PERIGEE_MODEL", "models/tiny-k2")).resolve())

EDGE_ONLY = pytest.mark.skipif(os.path.basename(FOLDER) != "tiny-k2", reason="the edge is the same for every model: once is enough")


ON_GPU = "cuda" in FLAGS


@functools.cache
def num_gpus():
    told = subprocess.run([PROGRAM, "doctor", "--json"], capture_output=True, text=True, timeout=120, check=False)
    return len(json.loads(told.stdout)["gpus"])


def rank_flags(ranks):
    """For so many tensor-parallel ranks, on GPUs each with one of its own."""
    if ON_GPU and ranks > num_gpus():
        pytest.skip(f"{ranks} ranks want as many GPUs")
    return ["--tensor-parallel-size", str(ranks)]


def drafting(num_drafts=3, kind="-eagle3-mla"):
    """With the model's own draft: its latents share its target's cache, keys and values by head (-eagle3) lie beside."""
    return ["--speculative-config", json.dumps({"method": "eagle3", "model": FOLDER + kind, "num_speculative_tokens": num_drafts})]


def start(tmp_path_factory, *flags):
    log = tmp_path_factory.mktemp("server") / "log"
    server = ServerProcess(PROGRAM, FOLDER, [*FLAGS, *flags], str(log))
    server.log_path = str(log)
    return server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    # One thread: these models are small, and the clients need the other core of a small machine.
    with start(tmp_path_factory, "--deterministic", "--selfcheck", "--threads", "1") as running:
        yield running
        assert wait_idle(running), "requests or blocks leaked"
    assert running.process.returncode == 0


@pytest.fixture
def launch(tmp_path_factory):
    """launch(*flags) -> a running server of the test's own."""
    running = []

    def launch_one(*flags):
        server = start(tmp_path_factory, *flags)
        running.append(server)
        server.wait_ready()
        return server

    yield launch_one
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def client(server):
    import openai  # the storm runs on machines without it

    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)


def gauge(metrics, name):
    """The value of the first sample of a metric, labels ignored."""
    for line in metrics.decode().splitlines():
        if line.startswith((name + " ", name + "{")):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def wait_idle(server, seconds=300):
    """Whether nothing runs, waits or holds a block within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        metrics = server.get("/metrics")[1]
        if all(gauge(metrics, name) == 0 for name in
               ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")):
            return True
        time.sleep(0.05)
    return False
