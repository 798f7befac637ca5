"""`perigee router` in front of real servers: replies are theirs, and a worker that dies or drains costs nobody a reply."""
import json
import signal
import threading
import time

import pytest

from conftest import EDGE_ONLY, FLAGS, FOLDER, PROGRAM, gauge, wait_idle
from server_process import RouterProcess, ServerProcess

pytestmark = EDGE_ONLY


def url(server):
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two servers of one model; tests that kill one start their own."""
    folder = tmp_path_factory.mktemp("workers")
    servers = [ServerProcess(PROGRAM, FOLDER, [*FLAGS, "--deterministic", "--threads", "1"], str(folder / f"log{i}")) for i in range(2)]
    for server in servers:
        server.wait_ready()
    yield servers
    for server in servers:
        assert wait_idle(server), "requests leaked through the router"
        assert server.stop() == 0


@pytest.fixture
def route(tmp_path):
    running = []

    def route_to(servers, *flags):
        command = [PROGRAM, "router", "--port", "0", "--health-check-interval-secs", "0.1", *flags]
        command += ["--worker-urls", *map(url, servers)] if servers else []
        router = RouterProcess(command, str(tmp_path / f"router{len(running)}"))
        running.append(router)
        if servers:
            router.wait_states({url(server): "ready" for server in servers})
        return router

    yield route_to
    for router in running:
        assert router.stop() == 0


BODY = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0, "max_tokens": 40}
LONG = {"prompt": [300, 301, 302], "temperature": 0, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}


def without_id(reply):
    return {**reply, "id": "", "created": 0}


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "cache_aware"])
def test_replies_are_those_of_the_workers(workers, route, policy):
    router = route(workers, "--policy", policy)
    model = workers[0].model
    expected = workers[0].post("/v1/chat/completions", {**BODY, "model": model})
    for _ in range(3):
        status, reply = router.post("/v1/chat/completions", {**BODY, "model": model})
        assert status == 200
        for usage in (reply["usage"], expected[1]["usage"]):
            usage.pop("prompt_tokens_details", None)
        assert without_id(reply) == without_id(expected[1])
    events = [event["choices"][0] for event in router.stream("/v1/completions", {**LONG, "model": model})]
    direct = [event["choices"][0] for event in workers[0].stream("/v1/completions", {**LONG, "model": model})]
    tokens = [[token for choice in each for token in choice["token_ids"]] for each in (events, direct)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 400
    assert router.get("/v1/models")[0] == 200
    status, refusal = router.post("/v1/chat/completions", {**BODY, "model": "other"})
    assert status == 404 and "no such model" in refusal["error"]["message"]


def test_a_stream_is_not_held_up(workers, route):
    router = route(workers)
    times = []
    for _ in router.stream("/v1/completions", {**LONG, "model": workers[0].model}):
        times.append(time.monotonic())
    assert len(times) > 100
    # Held up, all would come at the end.
    assert times[-1] - times[len(times) // 2] > 0.1 * (times[-1] - times[0])


def test_a_client_that_leaves_frees_its_worker(workers, route):
    router = route(workers)
    for _ in range(3):
        stream = router.stream("/v1/completions", {**LONG, "max_tokens": 3000, "model": workers[0].model})
        next(stream)
        stream.close()
    for server in workers:
        assert wait_idle(server, 30)
    assert gauge(router.get("/metrics")[1], "perigee_router_client_disconnects_total") == 3


def test_a_worker_that_is_killed(launch, route):
    victim, other = launch("--threads", "1"), launch("--threads", "1")
    router = route([victim, other], "--policy", "round_robin")
    body = {**LONG, "model": victim.model, "max_tokens": 1500}
    outcomes = []

    def client():
        try:
            outcomes.append(sum(1 for event in router.stream("/v1/completions", body) if event.get("choices")))
        except RuntimeError as error:
            outcomes.append(str(error))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    deadline = time.monotonic() + 60
    while gauge(victim.get("/metrics")[1], "vllm:num_requests_running") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    for thread in clients:
        thread.join()
    # The victim's two streams end without [DONE], the other's are whole.
    assert sum(outcome == 1500 for outcome in outcomes) == 2, outcomes
    assert sum("without [DONE]" in str(outcome) for outcome in outcomes) == 2, outcomes
    assert gauge(router.get("/metrics")[1], "perigee_router_cut_streams_total") == 2
    # Later requests go to the other one, also those that come before the death is noticed.
    for _ in range(6):
        assert router.post("/v1/completions", {**LONG, "model": victim.model, "max_tokens": 4})[0] == 200
    router.wait_states({url(victim): "lost", url(other): "ready"})


def test_a_worker_that_drains_finishes_its_stream(launch, route, workers):
    leaving = launch("--threads", "1")
    router = route([leaving, workers[0]], "--policy", "round_robin")
    body = {**LONG, "model": leaving.model, "max_tokens": 1500}
    streams = [router.stream("/v1/completions", body) for _ in range(2)]
    for stream in streams:
        next(stream)
    leaving.process.send_signal(signal.SIGTERM)
    for _ in range(4):
        assert router.post("/v1/completions", {**LONG, "model": leaving.model, "max_tokens": 4})[0] == 200
    assert [sum(1 for _ in stream) > 0 for stream in streams] == [True, True]
    assert leaving.process.wait(60) == 0


def test_workers_are_added_and_removed(workers, route):
    router = route(workers[:1])
    first, second = map(url, workers)
    assert router.post("/workers", {"url": second})[0] == 200
    router.wait_states({first: "ready", second: "ready"})
    stream = router.stream("/v1/completions", {**LONG, "max_tokens": 1000, "model": workers[0].model})
    next(stream)
    assert router.post("/workers/remove", {"url": first})[0] == 200
    assert router.post("/workers/remove", {"url": second})[0] == 200
    assert router.post("/v1/completions", {**LONG, "model": workers[0].model})[0] == 503
    assert len(router.states()) == 1, "the worker of the stream stays until its end"
    for _ in stream:
        pass
    router.wait_states({})


def test_keys_are_passed_on(launch, route):
    server = launch("--api-key", "secret", "--threads", "1")
    router = route([server])
    body = json.dumps({**BODY, "model": server.model})
    for key, expected in (("wrong", 401), ("secret", 200)):
        connection = router.connection()
        connection.request("POST", "/v1/chat/completions", body,
                           {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "X-Request-Id": "of-the-client"})
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("X-Request-Id")) == (expected, "of-the-client")
        reply.read()
        connection.close()
