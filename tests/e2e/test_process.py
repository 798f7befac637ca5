"""What the process owes its surroundings: signals, a log that nobody reads, memory that runs out, how it was linked."""
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from conftest import EDGE_ONLY, FLAGS, FOLDER, PROGRAM, wait_idle
from server_process import ServerProcess

pytestmark = EDGE_ONLY
MODEL = os.path.basename(FOLDER)
HANG_S = 300  # ends what hangs, no claim about speed


def wait_for(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def completion(server, **fields):
    return server.post("/v1/completions", {"model": MODEL, "prompt": [300, 301], "max_tokens": 4, **fields})


def test_the_last_line_at_start_has_the_url(server):
    ready = [line for line in server.text().splitlines() if " ready: " in line]
    assert len(ready) == 1 and ready[0].endswith(f" ready: {server.url}"), ready


def test_signals_that_mean_nothing_do_not_kill(launch):
    server = launch()
    for number, name in ((signal.SIGHUP, "SIGHUP"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGUSR2, "SIGUSR2")):
        server.process.send_signal(number)
        wait_for(lambda name=name: f"{name} has no effect" in server.text())
    assert completion(server)[0] == 200
    assert server.stop() == 0


def long_stream(server):
    events = server.stream("/v1/completions", {"model": MODEL, "prompt": [300, 301], "max_tokens": 10000, "temperature": 0,
                                               "ignore_eos": True})
    next(events)
    return events


def test_a_second_sigterm_within_a_second_is_an_echo_and_a_later_one_stops(launch):
    server = launch("--drain-seconds", "300")
    events = long_stream(server)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "a second signal stops at once" in server.text())
    first = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if time.monotonic() - first < 0.5:  # else this machine was too busy to send them within a second
        wait_for(lambda: "the same one" in server.text() or time.monotonic() - first > 1)
        assert "second signal: stopping now" not in server.text() or time.monotonic() - first > 1
        next(events)
    wait_for(lambda: time.monotonic() - first > 1.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_S) == 0
    assert "second signal: stopping now" in server.text()


# Its standard error is a small pipe, full, and read only at the end; 4,096 lines may wait.
def test_a_log_that_nobody_reads_stops_nothing():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen([PROGRAM, "serve", FOLDER, *FLAGS, "--port", str(port)], stdout=writing, stderr=writing)
    os.close(writing)
    try:
        server = ServerProcess.__new__(ServerProcess)
        server.process, server.port, server.model = process, port, MODEL
        server.text = lambda: ""
        server.wait_ready()
        connection = server.connection()
        for _ in range(4500):  # each is a line of 60 bytes or so
            connection.request("GET", "/v1/nothing-that-is-here-but-makes-a-line-of-the-log")
            assert connection.getresponse().read()
        assert completion(server)[0] == 200
        said = bytearray()

        def read_all():
            while piece := os.read(reading, 1 << 16):
                said.extend(piece)

        reader = threading.Thread(target=read_all)
        reader.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        reader.join(HANG_S)
        text = said.decode()
        assert re.search(r"warning \d+ log lines dropped", text), text[-2000:]
        assert text.rstrip().endswith("stopped"), text[-500:]
    finally:
        process.kill()
        os.close(reading)


def memory_mb(server, field):
    with open(f"/proc/{server.process.pid}/status", encoding="utf-8") as status:
        return int(re.search(rf"{field}:\s+(\d+) kB", status.read()).group(1)) / 1024


def upload(server, announced, sent):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n" % announced)
    try:
        client.sendall(b" " * sent)
    except OSError:  # it was refused meanwhile
        pass
    return client


def told(clients, beginning):
    """How many replies begin like that, once there is one and no more come for a moment."""
    count, silent = 0, list(clients)
    while silent and (readable := select.select(silent, [], [], 0.2 if count else HANG_S)[0]):
        for client in readable:
            silent.remove(client)
            try:
                count += client.recv(4096).startswith(beginning)
            except OSError:
                pass
    return count


def test_memory_that_runs_out_ends_no_process(launch):
    server = launch()
    assert completion(server)[0] == 200
    limit = int((memory_mb(server, "VmSize") + 60) * (1 << 20))
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for _ in range(2):
        clients = [upload(server, 32 << 20, 3 << 20) for _ in range(60)]
        told_503 = told(clients, b"HTTP/1.1 503")
        for client in clients:
            client.close()
        assert told_503, "none met the limit"
        assert server.process.poll() is None, server.text()[-2000:]
        assert server.get("/livez")[0] == 200
        wait_for(lambda: completion(server)[0] == 200)
    assert wait_idle(server)


def test_bodies_in_flight_have_a_budget(launch):
    server = launch()
    assert completion(server)[0] == 200
    before = memory_mb(server, "VmRSS")
    clients = [upload(server, 32 << 20, 5 << 20) for _ in range(100)]
    assert memory_mb(server, "VmRSS") - before < 600, "the budget is 256 MB"
    assert completion(server)[0] == 200, "small bodies find room"
    assert server.get("/livez")[0] == 200
    for client in clients:
        client.close()
    wait_for(lambda: completion(server, prompt="a" * (2 << 20))[0] == 400)  # too long for the model, but read


def test_heads_that_do_not_end_hold_little(launch):
    server = launch()
    assert completion(server)[0] == 200
    before = memory_mb(server, "VmRSS")
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) for _ in range(300)]
    for client in clients:
        client.sendall(b"GET /livez HTTP/1.1\r\n" + b"X-Filler: aaaaaaaaaaaa\r\n" * 1300)  # 31 kB of 32 KiB
    for client in clients:
        client.sendall(b"X")  # when the reply below is there, the heads have been read
    assert server.get("/livez")[0] == 200
    assert memory_mb(server, "VmRSS") - before < 300 * 64 / 1024 + 15, "64 KiB each, and what the allocator keeps"
    clients[0].sendall(b"-Filler: " + b"a" * 2000 + b"\r\n")
    assert clients[0].recv(100).startswith(b"HTTP/1.1 431")
    for client in clients:
        client.close()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_program_is_hardened():
    def readelf(*words):
        return subprocess.run(["readelf", "-W", *words, PROGRAM], capture_output=True, text=True, check=True).stdout

    segments, dynamic, symbols = readelf("-lh"), readelf("-d"), readelf("--dyn-syms")
    assert "GNU_RELRO" in segments and re.search(r"FLAGS.*(BIND_NOW|NOW)", dynamic), "RELRO is not full"
    assert re.search(r"Type:\s+DYN", segments), "not position independent"
    assert re.search(r"GNU_STACK\s.*RW ", segments), "an executable stack"
    assert "__stack_chk_fail" in symbols, "no stack protector"
    assert re.search(r"__(memcpy|snprintf|vsnprintf|read|fprintf|memmove|memset|fdelt|poll|pread64)_chk", symbols), "not fortified"
