"""Starts `perigee serve` on a free port and stops it; shared by the demo, the end-to-end tests and the scoring tool.

Standard library only: the demo runs on machines that have nothing else.
"""
import http.client
import json
import os
import signal
import socket
import subprocess
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A running server; use as a context manager. `log_path` receives its standard error."""

    def __init__(self, program, model, flags=(), log_path=os.devnull):
        self.port = free_port()
        self.model = os.path.basename(os.path.normpath(model))  # as the server names it
        self.log = open(log_path, "ab")
        command = [program, "serve", model, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def __enter__(self):
        self.wait_ready()
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_ready(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}")
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready within {timeout_s} s")

    def stop(self, timeout_s=30):
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

    def connection(self, timeout_s=120):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def get(self, path):
        connection = self.connection(10)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post(self, path, body, timeout_s=120):
        """Returns (status, parsed JSON)."""
        connection = self.connection(timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def stream(self, path, body, timeout_s=120):
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
