"""Prefill and decode in two processes behind the router: replies are one server's, and nothing stays held."""
import concurrent.futures
import json
import os
import re
import time

import pytest

from conftest import FLAGS, FOLDER, ON_GPU, PROGRAM, TOP, drafting, gauge, num_gpus, wait_idle
from server_process import PairProcess, ServerProcess
from test_tensor_parallel import expect_equal_up_to_a_tie

MODEL = os.path.basename(FOLDER)
COMMON = [*FLAGS, "--selfcheck", "--threads", "1"]
# (tp, dcp) of the prefill server and of the decode server, and the cache.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
LAYOUTS = [((1, 1), (1, 1), "bf16"), ((2, 1), (2, 2), "fp8"), ((2, 2), (1, 1), "fp8_ds_mla")]
if ON_GPU and num_gpus() < 4:
    LAYOUTS = [((1, 1), (1, 1), cache) for _, _, cache in LAYOUTS]


def of_layout(tp, dcp):
    return ["--tensor-parallel-size", str(tp), "--decode-context-parallel-size", str(dcp)]


def questions(count):
    with open(TOP / "tests/data/tiny_tasks/gsm_5shot_a.jsonl", encoding="utf-8") as file:
        return [json.loads(next(file))["prompt"] for _ in range(count)]


def body(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **fields}


def answer(server, prompt, **fields):
    status, reply = server.post("/v1/completions", body(prompt, **fields))
    assert status == 200, reply
    return reply["choices"]


def counts(pair):
    prefill, decode = (each.get("/metrics")[1] for each in pair.servers())
    return {"granted": gauge(prefill, "perigee:kv_leases_granted_total"), "held": gauge(prefill, "perigee:kv_leases"),
            "expired": gauge(prefill, "perigee:nixl_num_kv_expired_reqs_total"), "sent": gauge(prefill, "perigee:kv_bytes_sent_total"),
            "arrived": gauge(decode, "perigee:kv_transfers_total"), "failed": gauge(decode, "perigee:nixl_num_failed_transfers_total"),
            "taken": gauge(decode, "perigee:kv_bytes_received_total")}


def wait_let_go(pair, seconds=20):
    """Until no prompt is held for another server."""
    deadline = time.monotonic() + seconds
    while counts(pair)["held"] > 0:
        assert time.monotonic() < deadline, counts(pair)
        time.sleep(0.05)
    assert all(wait_idle(each) for each in pair.servers())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Of one layout, in deterministic mode: its replies have one server's bits."""
    with PairProcess(PROGRAM, FOLDER, [*COMMON, "--deterministic"], log_folder=str(tmp_path_factory.mktemp("pair"))) as running:
        yield running
        wait_let_go(running)
    assert all(each.process.returncode == 0 for each in (running, *running.servers()))


@pytest.mark.parametrize("prefill, decode, cache", LAYOUTS)
def test_unlike_layouts_answer_like_one_server(launch, tmp_path, prefill, decode, cache):
    common = [*COMMON, "--kv-cache-dtype", cache]
    prompts = questions(6)
    one = launch("--threads", "1", "--kv-cache-dtype", cache)
    with PairProcess(PROGRAM, FOLDER, common, of_layout(*prefill), of_layout(*decode), log_folder=str(tmp_path)) as pair, \
            concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        wanted = [choices[0] for choices in pool.map(lambda prompt: answer(one, prompt, logprobs=3), prompts)]
        for turn in range(2):  # again: with hits on both sides
            replies = [choices[0] for choices in pool.map(lambda prompt: answer(pair, prompt, logprobs=3), prompts)]
            flips = sum(expect_equal_up_to_a_tie(*each) for each in zip(wanted, replies))
            print(f"{prefill} to {decode}, {cache}, turn {turn}: {flips} of {len(prompts)} replies part at a tie")
            assert flips <= len(prompts) // 3
            wait_let_go(pair)
            seen = counts(pair)
            assert seen["failed"] == seen["expired"] == 0 and seen["granted"] >= len(prompts) * (turn + 1), seen
            if turn == 0:
                first = seen
        assert first["arrived"] == len(prompts) and first["sent"] == first["taken"] > 0, first
        assert seen["taken"] == first["taken"], "what was cached was sent again"


def test_every_kind_of_reply_has_one_servers_tokens(server, pair):
    prompt = questions(1)[0]
    for fields in ({}, {"n": 3, "temperature": 0.8, "seed": 5}, {"logprobs": 2, "presence_penalty": 1.5}, {"stop": ["####"]},
                   {"echo": True, "logprobs": 1}, {"max_tokens": 1}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        fields = {"seed": 3, "cache_salt": str(fields), **fields}
        wanted = answer(server, prompt, **fields)
        assert answer(pair, prompt, **fields) == wanted, fields
        streamed = {}
        for event in pair.stream("/v1/completions", body(prompt, **fields)):
            for choice in event["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert [streamed[i] for i in range(len(wanted))] == [choice["token_ids"] for choice in wanted], fields
    short = body("1 + 1 =")
    assert pair.post("/v1/completions", short)[1]["choices"] == server.post("/v1/completions", short)[1]["choices"]
    assert counts(pair)["failed"] == 0


def test_chats_and_tools(server, pair):
    question = questions(1)[0]
    tool = {"type": "function", "function": {"name": "add", "description": "Adds two numbers. " * 12, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}
    for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60, **more}
        replies = [each.post("/v1/chat/completions", chat) for each in (server, pair)]
        assert [status for status, _ in replies] == [200, 200], replies
        messages = [reply["choices"][0]["message"] for _, reply in replies]
        for message in messages:
            for call in message.get("tool_calls") or []:
                call.pop("id")
        assert messages[0] == messages[1], more


def test_a_long_prompt_travels_while_it_is_computed(server, tmp_path):
    """Bytes have left the prefill server while its request still runs, and the reply is one server's."""
    flags = [*COMMON, "--deterministic", "--max-num-batched-tokens", "128"]
    with PairProcess(PROGRAM, FOLDER, flags, log_folder=str(tmp_path)) as pair, concurrent.futures.ThreadPoolExecutor(1) as pool:
        overlaps = 0
        for turn in range(20):  # a machine under load may look too late
            prompt = [(i * i + 7 * i + turn) % 2000 for i in range(1500)]
            before = counts(pair)["sent"]
            reply = pool.submit(answer, pair, prompt)
            while not reply.done():
                seen = pair.prefill.get("/metrics")[1]
                overlaps += gauge(seen, "perigee:kv_bytes_sent_total") > before and gauge(seen, "vllm:num_requests_running") == 1
            assert reply.result()[0]["token_ids"] == answer(server, prompt)[0]["token_ids"]
            if overlaps:
                break
        assert overlaps > 0, "every prompt was sent after it was computed"
        wait_let_go(pair)
        seen = counts(pair)
        assert seen["arrived"] == turn + 1 and seen["failed"] == 0, seen


@pytest.mark.parametrize("flags, role", [(drafting(), "both"), (drafting(kind="-eagle3"), "both"), (["--speculative-config", json.dumps(NGRAM)], "decode")])
def test_drafts(server, tmp_path, flags, role):
    """What a draft model keeps travels with the blocks, in them or beside; prompt lookup needs none."""
    if flags == drafting(kind="-eagle3") and not os.path.exists(FOLDER + "-eagle3"):
        pytest.skip("no such draft is bundled with this model")
    prompts = questions(3)
    common = [*COMMON, "--deterministic"]
    with PairProcess(PROGRAM, FOLDER, common, flags if role == "both" else [], flags, log_folder=str(tmp_path)) as pair:
        for prompt in prompts:
            wanted = answer(server, prompt, max_tokens=40)[0]["token_ids"]
            assert answer(pair, prompt, max_tokens=40)[0]["token_ids"] == wanted
        wait_let_go(pair)
        seen = counts(pair)
        assert seen["arrived"] == len(prompts) and seen["failed"] == 0, seen
        assert gauge(pair.decode.get("/metrics")[1], "vllm:spec_decode_num_accepted_tokens_total") > 0


WHOLE = ["--speculative-config", json.dumps({**json.loads(drafting()[1]), "draft_tensor_parallel_size": 1})]


@pytest.mark.parametrize("prefill, decode, named", [
    ([], drafting(), "speculative-config"),
    (drafting(), [*WHOLE, *of_layout(2, 2)], "leave draft_tensor_parallel_size out here"),
    ([*WHOLE, *of_layout(2, 2)], WHOLE, "leave draft_tensor_parallel_size out on the peer"),
    ([], ["-q", "int8_per_channel_weight_only"], "-int8")])
def test_another_draft_or_precision_is_another_cache(tmp_path, prefill, decode, named):
    if ON_GPU and ("-q" in decode or named.startswith("leave")):
        pytest.skip("weights are quantised online on CPUs" if "-q" in decode else "takes several GPUs")
    with PairProcess(PROGRAM, FOLDER, COMMON, prefill, decode, log_folder=str(tmp_path)) as pair:
        status, reply = pair.post("/v1/completions", body(questions(1)[0]))
        assert status == 500 and named in reply["error"]["message"], reply


def test_a_client_that_leaves_leaves_nothing_held(pair):
    before = counts(pair)["granted"]
    for _ in range(4):
        stream = pair.stream("/v1/completions", body(questions(1)[0], max_tokens=2000, ignore_eos=True))
        next(stream)
        stream.close()
    wait_let_go(pair)
    assert counts(pair)["granted"] == before + 4


def test_one_request_id_through_all_three(pair):
    connection = pair.connection()
    connection.request("POST", "/v1/completions", json.dumps(body(questions(1)[0])),
                       {"Content-Type": "application/json", "X-Request-Id": "mine-77"})
    reply = connection.getresponse()
    assert reply.getheader("X-Request-Id") == "mine-77" and json.loads(reply.read())["id"] == "cmpl-mine-77"
    deadline = time.monotonic() + 30
    while not all("mine-77" in each.text() for each in (pair, *pair.servers())):  # the log is written behind
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lease(server, prompt, **fields):
    status, reply = server.post("/v1/completions", body(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **fields))
    assert status == 200, reply
    return reply["kv_transfer_params"]


def test_what_a_client_writes_into_the_parameters_is_not_believed(pair):
    prompt = questions(2)[1]
    params = lease(pair.prefill, prompt, cache_salt="a")
    assert params["do_remote_prefill"] and not params["do_remote_decode"] and params["remote_num_tokens"] >= 64, params
    for change in ({"remote_host": "169.254.169.254"}, {"remote_port": 22}, {"remote_num_tokens": 64}, {"remote_tag": "0" * 64},
                   {"remote_request_id": "f" * 16}, {"remote_engine_id": "0" * 16}, {"remote_tag": None}):
        status, reply = pair.decode.post("/v1/completions", body(prompt, kv_transfer_params={**params, **change}))
        assert status == 400 and "kv_transfer_params" in reply["error"]["param"], (change, reply)
    # Of other tokens: its node does not give it.
    status, reply = pair.decode.post("/v1/completions", body("A " + prompt, kv_transfer_params=params))
    assert status == 500 and "did not arrive" in reply["error"]["message"], reply
    # A server that takes no prompts says so, and does not compute what it was asked to fetch.
    status, reply = pair.prefill.post("/v1/completions", body(prompt, kv_transfer_params=params))
    assert status == 400 and "kv_consumer" in reply["error"]["message"], reply
    for wrong in ({"do_remote_decode": True}, {"do_remote_decode": True, "do_remote_prefill": True}):
        assert pair.decode.post("/v1/completions", body(prompt, kv_transfer_params=wrong))[0] == 400
    for more in ({"stream": True}, {"prompt": [prompt, prompt]}):
        assert pair.prefill.post("/v1/completions", {**body(prompt, kv_transfer_params={"do_remote_decode": True}), **more})[0] == 400


def test_a_prompt_that_nobody_fetches_is_let_go(tmp_path):
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"kv_lease_duration": 1}}
    with ServerProcess(PROGRAM, FOLDER, [*COMMON, "--kv-transfer-config", json.dumps(config), "--kv-side-channel-port", "0"],
                       str(tmp_path / "log")) as prefill:
        prefill.wait_ready()
        lease(prefill, questions(1)[0])
        assert wait_idle(prefill, 30)
        assert gauge(prefill.get("/metrics")[1], "vllm:nixl_num_kv_expired_reqs_total") == 1


def test_a_port_beyond_this_machine_needs_a_secret(tmp_path):
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_producer"})
    with pytest.raises(RuntimeError, match="--kv-secret-file") as refused:
        ServerProcess(PROGRAM, FOLDER, [*FLAGS, "--kv-transfer-config", config, "--kv-side-channel-host", "10.1.50.70"])
    assert re.search("exit code 2", str(refused.value))
