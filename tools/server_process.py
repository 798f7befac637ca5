"""Starts `perigee serve` on a free port and stops it; shared by the demo, the end-to-end tests and the scoring tool.

Standard library only: the demo runs on machines that have nothing else. Limits in seconds are there to end what hangs;
none says how fast anything should be.
"""
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ServerProcess:
    """A running server; use as a context manager. `log_path` receives its standard error."""

    def __init__(self, program, model, flags=(), log_path=None):
        self.model = os.path.basename(os.path.normpath(model))  # as the server names it
        self.start([program, "serve", model, "--port", "0", *flags], log_path)

    def start(self, command, log_path=None, environment=None):
        """Runs a command that listens as a server or router does, and reads its port."""
        self.log = open(log_path, "a+b") if log_path else tempfile.TemporaryFile()
        self.log_begin = os.fstat(self.log.fileno()).st_size
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)
        self.port = self.read_port()

    def __enter__(self):
        self.wait_ready()
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def text(self):
        """What the server has logged so far."""
        return os.pread(self.log.fileno(), 1 << 24, self.log_begin).decode(errors="replace")

    def read_port(self, timeout_s=300):
        """The port that the server chose, from the log: one that is looked for beforehand may be gone by then."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if found := re.search(r"listening on http://\S+:(\d+), ", self.text()):
                return int(found.group(1))
            if ended:
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}: {self.text()[-2000:]}")
            time.sleep(0.01)
        self.process.kill()
        raise RuntimeError(f"the server did not listen within {timeout_s} s")

    def wait_ready(self, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}: {self.text()[-2000:]}")
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready within {timeout_s} s")

    def stop(self, timeout_s=300):
        """SIGTERM (drain), then wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        return self.process.returncode

    def connection(self, timeout_s=300):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def get(self, path):
        connection = self.connection()
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post(self, path, body, timeout_s=300):
        """Returns (status, parsed JSON)."""
        connection = self.connection(timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def stream(self, path, body, timeout_s=300):
        """Yields the parsed events of a streamed reply; ends at [DONE] and fails without it."""
        connection = self.connection(timeout_s)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {reply.read().decode(errors='replace')}")
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
            raise RuntimeError("the stream ended without [DONE]")
        finally:
            connection.close()


class RouterProcess(ServerProcess):
    """A running `perigee router` (or a command that becomes one) in front of `workers`, its flags."""

    def __init__(self, command, log_path=None):
        self.start(command, log_path)

    def states(self):
        workers = json.loads(self.get("/workers")[1])["workers"]
        return {worker["url"]: worker["state"] for worker in workers}

    def wait_states(self, expected, seconds=60):
        deadline = time.monotonic() + seconds
        while self.states() != expected:
            assert time.monotonic() < deadline, (self.states(), expected)
            time.sleep(0.02)


class PairProcess(RouterProcess):
    """A server that prefills, one that decodes, and itself: the router in front of them."""

    def __init__(self, program, model, flags=(), prefill=(), decode=(), router=(), log_folder=None, extra=None):
        def log(name):
            return os.path.join(log_folder, name) if log_folder else None

        def server(role, *more):
            config = json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra or {}})
            return ServerProcess(program, model, [*flags, "--kv-transfer-config", config, *more], log(role))

        with contextlib.ExitStack() as started:  # stopped where a later one does not start
            self.prefill = server("kv_producer", "--kv-side-channel-port", "0", *prefill)
            started.callback(self.prefill.stop)
            self.decode = server("kv_consumer", *decode)
            started.callback(self.decode.stop)
            self.model = self.prefill.model
            for each in self.servers():
                each.wait_ready()
            urls = [f"http://127.0.0.1:{each.port}" for each in self.servers()]
            super().__init__([program, "router", "--port", "0", "--health-check-interval-secs", "0.1", "--policy", "round_robin",
                              "--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1], *router], log("router"))
            started.callback(super().stop)
            self.wait_states(dict.fromkeys(urls, "ready"))
            started.pop_all()

    def servers(self):
        return [self.prefill, self.decode]

    def stop(self, timeout_s=300):
        return max(abs(each.stop(timeout_s)) for each in [super(), self.decode, self.prefill])
