"""Nothing that one client sends touches another: the table of hostile_cases.py and wrong types for every field, against
one server that streams to a client all the while. After each case the server is alive, answers its probe, and gives a
control request the same bits as before; at the end the stream has the ids that it has alone.

Wall-clock time is not asserted; every limit in seconds is there to end what hangs.
"""
import collections
import http.client
import json
import re
import socket
import threading

import pytest

from conftest import EDGE_ONLY
from hostile_cases import CASES, COMPLETIONS
from request_fields import CHAT, FIELDS, Refused, Used, request

pytestmark = EDGE_ONLY
HANG_S = 300
CONTROL = {"prompt": [65, 300, 301, 302], "max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 2,
           "return_token_ids": True}
STREAMED = {"prompt": [65, 400, 401, 402], "max_tokens": 12000, "temperature": 0.8, "seed": 3, "ignore_eos": True,
            "return_token_ids": True}
TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError",
         408: "TimeoutError", 413: "RequestTooLargeError", 415: "BadRequestError", 431: "RequestTooLargeError",
         417: "BadRequestError", 500: "InternalServerError", 501: "NotImplementedError", 503: "ServiceUnavailableError",
         505: "NotImplementedError"}
MAX_ERROR_BYTES = 4096
WRONG = [True, 7, 1.5, "x", [], {}, ["\ud800"]]
# Prompts and replies cost time and show nothing here.
SHORT = {COMPLETIONS: {"prompt": "x", "max_tokens": 1},
         CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "max_completion_tokens": None}}


class Bystander(threading.Thread):
    """A client whose stream runs while others misbehave; begins again when it is complete."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.ids, self.failure = server, [], None
        self.stop, self.running = threading.Event(), threading.Event()

    def run(self):
        try:
            while not self.stop.is_set():
                ids = []
                for event in self.server.stream(COMPLETIONS, STREAMED, HANG_S):
                    ids += event["choices"][0]["token_ids"]
                    self.running.set()
                    if self.stop.is_set():
                        break
                if len(ids) > len(self.ids):
                    self.ids = ids
        except Exception as failure:  # reported by the test
            self.failure = failure
            self.running.set()


@pytest.fixture(scope="module")
def bystander(server):
    client = Bystander(server)
    client.start()
    assert client.running.wait(HANG_S)
    yield client
    client.stop.set()
    client.join(HANG_S)
    assert client.failure is None, client.failure
    length = min(len(client.ids), 300)
    alone = server.post(COMPLETIONS, {**STREAMED, "max_tokens": length})[1]["choices"][0]["token_ids"]
    assert length > 0 and alone == client.ids[:length], "the stream beside hostile requests had other tokens"


def control(server):
    status, reply = server.post(COMPLETIONS, CONTROL)
    assert status == 200, reply
    return reply["choices"]


@pytest.fixture(scope="module")
def expected(server):
    control(server)
    return control(server)  # the prompt may now be cached, as it is from here on


def check_unharmed(server, bystander, expected):
    assert server.process.poll() is None, server.text()[-2000:]
    assert server.get("/livez")[0] == 200
    assert control(server) == expected
    assert bystander.failure is None, bystander.failure


def check_error(status, body, head=""):
    """The one shape of errors; returns its content."""
    assert len(body) <= MAX_ERROR_BYTES, f"an error of {len(body)} bytes"
    error = json.loads(body.decode("utf-8"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["type"] == TYPES[status], error
    assert error["message"] and (error["param"] is None or error["param"])
    assert not re.search(r"0x[0-9a-f]{6}|/src/|\.cc\b|std::|boost", error["message"]), "the message shows internals"
    return error


def send_body(server, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = server.connection(HANG_S)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def send_raw(server, data, ends):
    """Status and body of the first reply, (0, b"") for a connection that is closed without one; `ends` sends nothing more."""
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            return reply.status, reply.read()
        except (ConnectionError, http.client.BadStatusLine):
            return 0, b""


def test_names_of_cases_differ():
    assert [name for name, count in collections.Counter(case.name for case in CASES).items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile(server, bystander, expected, case):
    if case.raw is None:
        status, body = send_body(server, case.path, case.body)
    else:
        status, body = send_raw(server, case.raw, ends=0 in case.status)
    assert status in case.status, body[:1000]
    if status == 200 and body:
        json.loads(body.decode("utf-8"))
    elif status:
        error = check_error(status, body)
        assert case.param is None or error["param"] == case.param, error
        assert case.says in error["message"], error
    check_unharmed(server, bystander, expected)


@pytest.mark.parametrize("path, name", [(path, name) for path, fields in FIELDS.items() for name in fields])
def test_wrong_types(server, bystander, expected, path, name):
    """Any value of any type in any field is served or refused, and the refusal names the field."""
    connection = server.connection(HANG_S)
    field = FIELDS[path][name]
    among = {**(field.among if isinstance(field, Used) else {}), **SHORT.get(path, {})}
    for value in WRONG:
        body = request(path, among)
        body[name] = value
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status in (200, 400) or (name == "model" and reply.status == 404), data[:1000]
        if reply.status == 200:
            assert not isinstance(field, Refused) or value == field.harmless, f"{value!r} has no effect"
            data.decode("utf-8")
            continue
        error = check_error(reply.status, data)
        assert name in re.split(r"[.\[ ]", error["param"] or "") or name in error["message"], (value, error)
    connection.close()
    check_unharmed(server, bystander, expected)


def test_errors_in_streams_have_the_same_shape(server, bystander, expected):
    connection = server.connection(HANG_S)
    body = {"prompt": [65], "max_tokens": 12000, "ignore_eos": True, "stream": True, "timeout": 0.2}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status == 200:
        last = [line for line in reply.read().split(b"\n") if line.startswith(b"data: ")][-1]
        assert b"[DONE]" not in last
        event = json.loads(last[6:])["error"]
    else:
        event = json.loads(reply.read())["error"]  # the first token came too late
    assert set(event) == {"message", "type", "param", "code"}
    assert event["code"] == 504 and event["type"] == "TimeoutError" and event["param"] is None
    check_unharmed(server, bystander, expected)
