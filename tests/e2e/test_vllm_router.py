"""vLLM's own router, from PyPI (clients.txt), in front of a prefill and a decode server: replies are one server's, and
count its tokens."""
import json
import os
import pathlib
import socket
import time

import pytest

from conftest import EDGE_ONLY, FLAGS, FOLDER, ON_GPU, PROGRAM, TOP
from server_process import PairProcess, ServerProcess
from test_pd import answer, body, counts, questions, wait_let_go

ROUTER = pathlib.Path(os.environ.get("PERIGEE_VLLM_ROUTER", TOP / ".venv-clients" / "bin" / "vllm-router"))
pytestmark = [EDGE_ONLY, pytest.mark.skipif(ON_GPU, reason="the router is the same for every device: once is enough"),
              pytest.mark.skipif(not ROUTER.exists() and not os.environ.get("CI"), reason="tools/setup check installs vllm-router")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class VllmRouter(ServerProcess):
    """In front of the two servers of `pair`. It takes no port 0 and logs none, so both of its ports are looked for."""

    def __init__(self, pair, log_path):
        self.port = free_port()
        urls = [f"http://127.0.0.1:{each.port}" for each in pair.servers()]
        self.start([str(ROUTER), "--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(free_port()), "--policy", "round_robin",
                    "--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]], log_path)

    def read_port(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return self.port
            except OSError:
                pass
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"vllm-router did not start: {self.text()[-2000:]}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    with PairProcess(PROGRAM, FOLDER, [*FLAGS, "--selfcheck", "--threads", "1", "--deterministic"], log_folder=str(folder)) as running:
        running.vllm = VllmRouter(running, str(folder / "vllm-router"))
        yield running
        running.vllm.stop()
        wait_let_go(running)


def test_replies_are_one_servers(server, pair):
    before = counts(pair)
    for prompt in questions(3):
        wanted = answer(server, prompt)
        assert answer(pair.vllm, prompt) == wanted
        events = pair.vllm.stream("/v1/completions", body(prompt))
        assert [token for event in events for choice in event["choices"] for token in choice["token_ids"]] == wanted[0]["token_ids"]
    chat = {"model": pair.model, "messages": [{"role": "user", "content": questions(1)[0]}], "temperature": 0, "max_tokens": 24}
    replies = [each.post("/v1/chat/completions", chat) for each in (server, pair.vllm)]
    assert [status for status, _ in replies] == [200, 200], replies
    assert replies[0][1]["choices"][0]["message"] == replies[1][1]["choices"][0]["message"]
    seen = counts(pair)
    assert seen["arrived"] - before["arrived"] == 4 and seen["failed"] == before["failed"], seen


def test_usage(pair):
    """The router writes the prefill server's count of cached tokens into replies: what came from there is not counted."""
    prompt = list(range(300, 500))
    for turn, cached in ((1, 0), (2, 192)):
        usage = pair.vllm.post("/v1/completions", body(prompt, max_tokens=4, ignore_eos=True))[1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 4), usage
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached, (turn, usage)
    fields = {"max_tokens": 4, "ignore_eos": True, "cache_salt": "other", "stream_options": {"include_usage": True}}
    streamed = pair.vllm.stream("/v1/completions", body(prompt, **fields))
    usage = [event["usage"] for event in streamed if event.get("usage")][-1]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, usage


def test_what_a_server_refuses_the_client_is_told(pair):
    status, reply = pair.vllm.post("/v1/completions", body("x", temperature=-1))
    assert status == 400 and "temperature" in json.dumps(reply), reply
