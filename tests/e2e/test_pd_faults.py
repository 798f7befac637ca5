"""What fails between a prefill and a decode server: never a wrong reply, nothing stays held, and both serve on.

Leases are short here, and all waits for a peer follow from that.
"""
import concurrent.futures
import contextlib
import hashlib
import hmac
import json
import os
import random
import signal
import socket
import threading
import time

import pytest

from conftest import EDGE_ONLY, FOLDER, ON_GPU, PROGRAM, gauge, wait_idle
from server_process import ServerProcess
from test_pd import COMMON, answer, body, questions

pytestmark = EDGE_ONLY
OVER_TCP = pytest.mark.skipif(ON_GPU, reason="by CUDA IPC units do not cross the connection")
LEASE_S = 8
SECRET = "a test's secret, known to all"


SOAK = "PERIGEE_SOAK" in os.environ


def flags_of(role, *more):
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    return [*COMMON, "--deterministic", "--kv-secret", SECRET, "--kv-transfer-config", json.dumps(config), "--kv-side-channel-port", "0", *more]


def start(role, log, *more):
    server = ServerProcess(PROGRAM, FOLDER, flags_of(role, *more), str(log))
    server.wait_ready()
    return server


class CrampedServer(ServerProcess):
    """Its log may grow to some KiB: writes to it fail from then on, as on a full disk."""

    LIMIT_KIB = 8

    def __init__(self, role, log):
        self.model = os.path.basename(FOLDER)
        self.log_path = str(log)
        self.start(["bash", "-c", f'ulimit -f {self.LIMIT_KIB} && exec "$@"', "bash", PROGRAM, "serve", FOLDER, "--port", "0", *flags_of(role)], self.log_path)
        self.wait_ready()

    def fill(self):
        deadline = time.monotonic() + 60
        while os.path.getsize(self.log_path) < self.LIMIT_KIB << 10:
            assert time.monotonic() < deadline
            self.post("/v1/completions", {"prompt": "a line of the log", "max_tokens": 1})


class Servers:
    def __init__(self, folder):
        self.folder, self.num_started, self.salt = folder, 0, 0
        self.prefill = self.start("kv_producer")
        self.decode = self.start("kv_consumer")

    def start(self, role, *more):
        self.num_started += 1
        return start(role, self.folder / f"{role}{self.num_started}", *more)

    def lease(self, prompt):
        """What the prefill server replies; each prompt is new to both servers."""
        self.salt += 1
        fields = {"cache_salt": f"salt {self.salt}", "seed": 1}
        status, reply = self.prefill.post("/v1/completions", body(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **fields))
        assert status == 200, reply
        return {**fields, "kv_transfer_params": reply["kv_transfer_params"]}

    def decoded(self, prompt, fields):
        """-> the tokens, or None for an error."""
        status, reply = self.decode.post("/v1/completions", body(prompt, **fields))
        assert status == 200 or (status == 500 and "did not arrive" in reply["error"]["message"]), reply
        return reply["choices"][0]["token_ids"] if status == 200 else None

    def wait_no_lease(self):
        deadline = time.monotonic() + 2 * LEASE_S + 1
        while gauge(self.prefill.get("/metrics")[1], "perigee:kv_leases") > 0:
            assert time.monotonic() < deadline, "a prompt is still held"
            time.sleep(0.05)

    def wait_let_go(self):
        self.wait_no_lease()
        assert wait_idle(self.prefill, 20) and wait_idle(self.decode, 20)

    def stop(self):
        return [self.decode.stop(), self.prefill.stop()]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    running = Servers(tmp_path_factory.mktemp("faults"))
    yield running
    try:
        running.wait_let_go()
    finally:
        codes = running.stop()
    assert codes == [0, 0]


@pytest.fixture(scope="module")
def prompts(server):
    """With the tokens that one server makes of them."""
    return [(prompt, answer(server, prompt, seed=1)[0]["token_ids"]) for prompt in questions(3)]


def expect_served(servers, prompts):
    for prompt, wanted in prompts:
        assert servers.decoded(prompt, servers.lease(prompt)) == wanted
    servers.wait_let_go()


def test_a_prefill_server_that_is_killed_and_comes_back(servers, prompts):
    prompt = prompts[0][0]
    expect_served(servers, prompts[:1])
    before = servers.lease(prompt)
    port = before["kv_transfer_params"]["remote_port"]
    servers.prefill.process.kill()
    servers.prefill.process.wait()
    assert servers.decoded(prompt, before) is None
    servers.prefill = servers.start("kv_producer", "--kv-side-channel-port", str(port))
    assert servers.decoded(prompt, before) is None, "a lease of its earlier life"
    expect_served(servers, prompts)


def test_a_prefill_server_that_is_killed_while_it_is_read(servers, prompts):
    prompt, wanted = prompts[1]
    for delay_s in (0, 0.002, 0.01):
        fields = servers.lease(prompt)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reply = pool.submit(servers.decoded, prompt, fields)
            time.sleep(delay_s)
            servers.prefill.process.kill()
            assert reply.result(60) in (wanted, None)
        servers.prefill.process.wait()
        servers.prefill = servers.start("kv_producer")
    expect_served(servers, prompts)


def test_a_decode_server_that_is_killed(servers, prompts):
    servers.lease(prompts[0][0])
    fields = servers.lease(prompts[1][0])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(servers.decode.post, "/v1/completions", body(prompts[1][0], max_tokens=2000, ignore_eos=True, **fields))
        time.sleep(0.05)
        servers.decode.process.kill()
        with pytest.raises(Exception):
            reply.result(60)
    servers.decode.process.wait()
    servers.decode = servers.start("kv_consumer")
    expect_served(servers, prompts)


@contextlib.contextmanager
def standing_still(server):
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_servers_that_stand_still(servers, prompts):
    prompt, _ = prompts[2]
    fields = servers.lease(prompt)
    with standing_still(servers.prefill):
        begin = time.monotonic()
        assert servers.decoded(prompt, fields) is None
        assert time.monotonic() - begin < 3 * LEASE_S
    expect_served(servers, prompts)
    # The decode server wakes up after its lease has ended: what it would read may be another's by then.
    fields = servers.lease(prompt)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with standing_still(servers.decode):
            reply = pool.submit(servers.decoded, prompt, fields)
            servers.wait_no_lease()
        assert reply.result(60) is None
    expect_served(servers, prompts)


@pytest.mark.skipif(not SOAK, reason="minutes")
def test_a_minute_without_either_server(servers, prompts):
    prompt, _ = prompts[0]
    for which in ("prefill", "decode"):
        fields = servers.lease(prompt)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with standing_still(getattr(servers, which)):
                reply = pool.submit(servers.decoded, prompt, fields)
                time.sleep(60)
            assert reply.result(60) is None, which
        expect_served(servers, prompts)


def test_a_full_disk_stops_nobody(servers, prompts, tmp_path):
    """Of what these servers write to files only the log goes on while they serve."""
    usual = servers.prefill, servers.decode
    cramped = [CrampedServer(role, tmp_path / role) for role in ("kv_producer", "kv_consumer")]
    servers.prefill, servers.decode = cramped
    try:
        for server in cramped:
            server.fill()
        expect_served(servers, prompts)
        # The log line of a failure is lost, and nothing else.
        assert servers.decoded(prompts[0][0], through(servers.lease(prompts[0][0]), 9)) is None, "nobody is at that port"
        expect_served(servers, prompts)
        assert all(os.path.getsize(server.log_path) == server.LIMIT_KIB << 10 for server in cramped)
    finally:
        servers.prefill, servers.decode = usual
        codes = [server.stop() for server in reversed(cramped)]
    assert codes == [0, 0]


class Middle(threading.Thread):
    """Passes bytes between connections and a port, each piece through `change`, which may end the connection (None)."""

    def __init__(self, port, change):
        super().__init__(daemon=True)
        self.to, self.change = port, change
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self):
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.to))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                data = self.change(bytearray(data))
                if data is None:
                    break
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def through(fields, port):
    """The same lease at another address, with the tag that who knows the secret can make."""
    params = {**fields["kv_transfer_params"], "remote_port": port}
    text = (f"{int(params['remote_engine_id'], 16)} {int(params['remote_request_id'], 16)} {params['remote_num_tokens'] // 64} "
            f"{params['remote_host']}:{port}")
    params["remote_tag"] = hmac.new(SECRET.encode(), b"lease\0" + text.encode(), hashlib.sha256).hexdigest()
    return {**fields, "kv_transfer_params": params}


# Of bytes; a transfer has some hundred thousand.
@OVER_TCP
@pytest.mark.parametrize("share", [0, 0.05, 1e-4, 2e-6])
def test_damaged_bytes(servers, prompts, share):
    rng = random.Random(7)
    gap = 1000  # bytes that pass before the next one is damaged
    num_damaged = 0

    def damage(data):
        nonlocal gap, num_damaged
        at = 0
        while share > 0 and at + gap < len(data):
            at += gap
            data[at] ^= rng.randrange(1, 256)
            num_damaged += 1
            gap = 1 + int(rng.expovariate(share))
        gap -= len(data) - at
        return data

    middle = Middle(servers.lease(prompts[0][0])["kv_transfer_params"]["remote_port"], damage)
    outcomes = []
    for prompt, wanted in prompts * 3:
        tokens = servers.decoded(prompt, through(servers.lease(prompt), middle.port))
        assert tokens in (wanted, None)
        outcomes.append(tokens is not None)
    middle.listener.close()
    assert (num_damaged > 0) == (share > 0)
    assert share > 0 or all(outcomes)
    assert share == 0 or not all(outcomes), "a damaged byte was not seen"
    assert share < 0.01 or not any(outcomes)
    expect_served(servers, prompts)


@OVER_TCP
def test_a_connection_that_is_cut(servers, prompts):
    passed = 0

    def counted(data):
        nonlocal passed
        passed += len(data)
        return data

    def through_middle(change):
        fields = servers.lease(prompts[0][0])
        middle = Middle(fields["kv_transfer_params"]["remote_port"], change)
        tokens = servers.decoded(prompts[0][0], through(fields, middle.port))
        middle.listener.close()
        return tokens

    assert through_middle(counted) == prompts[0][1]
    whole = passed
    for num_bytes in (10, 100, 300, 1000, 5000, whole // 2, whole * 9 // 10):
        left = [num_bytes]

        def cut(data):
            left[0] -= len(data)
            return data if left[0] > 0 else None

        assert through_middle(cut) is None, f"cut after {num_bytes} of {whole} bytes"
        assert left[0] <= 0
    expect_served(servers, prompts)


def test_recompute_answers_all_the_same(servers, prompts):
    decode, other = servers.decode, servers.start("kv_consumer", "--kv-load-failure-policy", "recompute")
    servers.decode = other
    try:
        for prompt, wanted in prompts:
            fields = servers.lease(prompt)
            assert servers.decoded(prompt, through(fields, 9)) == wanted, "nobody is at that port"
        assert gauge(other.get("/metrics")[1], "vllm:nixl_num_failed_transfers_total") == len(prompts)
        assert wait_idle(other)
    finally:
        servers.decode = decode
        assert other.stop() == 0
    servers.wait_let_go()
