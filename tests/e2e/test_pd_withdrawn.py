"""A prefill server that ends a prompt's computation while its blocks travel: what it withdraws the decode server computes,
whatever the policy; what it loses is an error or is computed, by the policy. Never a wrong reply, and nothing stays held."""
import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import EDGE_ONLY, FOLDER, ON_GPU, PROGRAM, gauge, wait_idle
from server_process import ServerProcess
from test_pd import COMMON, body

pytestmark = pytest.mark.skipif(ON_GPU, reason="prompts are computed too fast to be stopped midway")
LEASE_S = 6
BLOCK = 64
LONG = 2000  # tokens; steps of one block take most of a second for it
DEADLINES_S = (0.3, 0.6, 1.2)  # one of them passes midway, on a fast machine and on a busy one


def start(role, log, *more):
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    return ServerProcess(PROGRAM, FOLDER, [*COMMON, "--deterministic", "--kv-transfer-config", json.dumps(config), *more], str(log))


def start_prefill(log, *more):
    return start("kv_producer", log, "--kv-side-channel-port", "0", "--max-num-batched-tokens", str(BLOCK), *more)


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    """Its policy is `fail`: what is not withdrawn but lost is an error."""
    with start("kv_consumer", tmp_path_factory.mktemp("withdrawn") / "decode") as running:
        yield running
    assert running.process.returncode == 0


@pytest.fixture(scope="module")
def prefill(tmp_path_factory):
    with start_prefill(tmp_path_factory.mktemp("withdrawn") / "prefill") as running:
        yield running
    assert running.process.returncode == 0


def tokens_of(num_tokens, salt):
    """New to every cache."""
    return [5 + (17 * index + 31 * salt) % 1900 for index in range(num_tokens)]


def seen(prefill, decode):
    there, here = prefill.get("/metrics")[1], decode.get("/metrics")[1]
    return {"held": gauge(there, "perigee:kv_leases"), "withdrawn": gauge(there, "perigee:kv_leases_withdrawn_total"),
            "given up": gauge(here, "perigee:kv_transfers_withdrawn_total"),
            "arrived": gauge(here, "perigee:kv_transfers_total"), "failed": gauge(here, "perigee:nixl_num_failed_transfers_total")}


def until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def growing_lease(prefill, prompt, **fields):
    """-> the connection of a prompt that is computed, and what its lease's reader is told, as a router gets it."""
    connection = prefill.connection()
    asked = body(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "announce_early": True}, **fields)
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200
    first = json.loads(reply.readline()[6:])
    try:
        yield connection, first["kv_transfer_params"]
    finally:
        reply.close()
        connection.close()


def decoded(decode, prompt, **fields):
    return decode.post("/v1/completions", body(prompt, max_tokens=8, **fields))


def alone(decode, prompt):
    status, reply = decoded(decode, prompt, cache_salt="alone")
    assert status == 200, reply
    return reply["choices"][0]["token_ids"]


def wait_let_go(prefill, decode):
    until(lambda: gauge(prefill.get("/metrics")[1], "perigee:kv_leases") == 0, 2 * LEASE_S + 1)
    assert wait_idle(prefill, 20) and wait_idle(decode, 20)


def sent(prefill):
    return gauge(prefill.get("/metrics")[1], "perigee:kv_bytes_sent_total")


def stopped_midway(prefill, decode, prompt, end, **fields):
    """-> whether a part of the prompt had arrived when its computation stopped, by `end`, and the decode server's reply."""
    before = sent(prefill)
    with growing_lease(prefill, prompt, **fields) as (connection, params), ThreadPoolExecutor(1) as pool:
        reply = pool.submit(decoded, decode, prompt, kv_transfer_params=params)
        until(lambda: sent(prefill) > before or reply.done())
        midway = sent(prefill) > before
        end(connection)
        return midway, reply.result(120)


def expect_computed_here(prefill, decode, prompt, wanted, end, **fields):
    """-> as stopped_midway(): whether it was that."""
    before = seen(prefill, decode)
    midway, (status, reply) = stopped_midway(prefill, decode, prompt, end, **fields)
    assert status == 200 and reply["choices"][0]["token_ids"] == wanted, reply
    wait_let_go(prefill, decode)
    if not midway:
        return False
    after = {key: value - before[key] for key, value in seen(prefill, decode).items()}
    assert after == {"held": 0, "withdrawn": 1, "given up": 1, "arrived": 0, "failed": 0}, after
    return True


def expect_served(prefill, decode, salt):
    prompt = tokens_of(300, salt)
    wanted, before = alone(decode, prompt), seen(prefill, decode)["arrived"]
    with growing_lease(prefill, prompt) as (_, params):
        status, reply = decoded(decode, prompt, kv_transfer_params=params)
    assert status == 200 and reply["choices"][0]["token_ids"] == wanted
    assert seen(prefill, decode)["arrived"] == before + 1
    wait_let_go(prefill, decode)


def test_a_prompt_whose_router_leaves(prefill, decode):
    prompt = tokens_of(LONG, 1)
    leave = lambda connection: connection.sock.shutdown(socket.SHUT_RDWR)
    assert expect_computed_here(prefill, decode, prompt, alone(decode, prompt), leave)
    expect_served(prefill, decode, 2)


def test_a_prompt_whose_deadline_passes(prefill, decode):
    def passes_midway(salt, deadline_s):
        prompt = tokens_of(LONG, salt)
        return expect_computed_here(prefill, decode, prompt, alone(decode, prompt), lambda _: None, timeout=deadline_s)
    assert any(passes_midway(10 + turn, deadline_s) for turn, deadline_s in enumerate(DEADLINES_S))
    expect_served(prefill, decode, 4)


@EDGE_ONLY
def test_a_prompt_that_is_preempted(decode, tmp_path):
    """By an output that came before it and needs the page that is left."""
    small = ["--max-num-batched-tokens", "8", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(9 << 20)]
    with start_prefill(tmp_path / "prefill", *small) as prefill:
        pages = int(re.search(r'num_gpu_blocks="(\d+)"', prefill.get("/metrics")[1].decode())[1])
        prompt = tokens_of((pages - 3) * BLOCK, 6)
        wanted = alone(decode, prompt)
        earlier = prefill.stream("/v1/completions", body(tokens_of(20, 5), max_tokens=600, ignore_eos=True))
        next(earlier)
        assert expect_computed_here(prefill, decode, prompt, wanted, lambda _: None)
        assert gauge(prefill.get("/metrics")[1], "vllm:num_preemptions_total") == 1
        assert len(list(earlier)) > 500
        expect_served(prefill, decode, 7)
    assert prefill.process.returncode == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_server_that_dies_while_the_lease_grows(tmp_path, policy):
    """Nobody has withdrawn it: the policy decides."""
    def kill(_):
        lost.process.kill()
        lost.process.wait()

    prompt = tokens_of(LONG, 8)
    with start("kv_consumer", tmp_path / "decode", "--kv-load-failure-policy", policy) as decode:
        with start_prefill(tmp_path / "lost") as lost:
            wanted = alone(decode, prompt)
            midway, (status, reply) = stopped_midway(lost, decode, prompt, kill)
            assert midway
        if policy == "fail":
            assert status == 500 and "did not arrive" in reply["error"]["message"], reply
        else:
            assert status == 200 and reply["choices"][0]["token_ids"] == wanted, reply
        assert gauge(decode.get("/metrics")[1], "perigee:nixl_num_failed_transfers_total") == 1
        assert wait_idle(decode, 20)
        with start_prefill(tmp_path / "next") as following:
            expect_served(following, decode, 9)
    assert (decode.process.returncode, following.process.returncode) == (0, 0)
