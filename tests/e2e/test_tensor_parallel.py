"""A model that several ranks share, through HTTP: it answers like one rank, up to ties."""
import concurrent.futures
import json
import os

import pytest

from conftest import FOLDER, ON_GPU, TOP, rank_flags, wait_idle

MODEL = os.path.basename(FOLDER)
TIE = 0.05  # between the log-probabilities of the two most likely tokens
MOST_APART = 0.1  # log-probabilities of the same token


def questions(count):
    with open(TOP / "tests/data/tiny_tasks/gsm_0shot.jsonl", encoding="utf-8") as file:
        return [json.loads(next(file))["prompt"] for _ in range(count)]


def answer(server, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, "return_token_ids": True, **fields}
    status, reply = server.post("/v1/completions", body)
    assert status == 200, reply
    return reply["choices"]


def expect_equal_up_to_a_tie(one, other):
    """-> whether they part; there the two most likely tokens of the one are nearly as likely as each other."""
    for t, (a, b) in enumerate(zip(one["token_ids"], other["token_ids"])):
        if a != b:
            first, second = sorted(one["logprobs"]["top_logprobs"][t].values(), reverse=True)[:2]
            assert first - second < TIE, f"token {t} differs without a tie: {one} {other}"
            return True
        assert abs(one["logprobs"]["token_logprobs"][t] - other["logprobs"]["token_logprobs"][t]) < MOST_APART
    assert len(one["token_ids"]) == len(other["token_ids"])
    return False


@pytest.mark.parametrize("ranks, more", [(2, []), (2, ["--enable-expert-parallel"]), (4, [])])
def test_ranks_answer_like_one(server, launch, ranks, more):
    group = launch("--deterministic", "--selfcheck", "--threads", "1", *rank_flags(ranks), *more)
    prompts = questions(8)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        one, other = (list(pool.map(lambda prompt, at=at: answer(at, prompt, logprobs=3)[0], prompts)) for at in (server, group))
    flips = sum(expect_equal_up_to_a_tie(*pair) for pair in zip(one, other))
    print(f"{ranks} ranks: {flips} of {len(prompts)} replies part from one rank's at a tie")
    assert flips <= len(prompts) // 4
    # The same server, the same bits: streamed or whole, greedy or drawn, with log-probabilities or without, by choice.
    for fields in ({"temperature": 0.8, "seed": 5, "n": 3}, {"n": 2}, {"presence_penalty": 1.5, "temperature": 0.5, "seed": 6}):
        whole = [choice["token_ids"] for choice in answer(group, prompts[0], **fields)]
        assert [choice["token_ids"] for choice in answer(group, prompts[0], logprobs=1, **fields)] == whole
        streamed = [[] for _ in whole]
        body = {"model": MODEL, "prompt": prompts[0], "max_tokens": 32, "temperature": 0, "return_token_ids": True, **fields}
        for event in group.stream("/v1/completions", body):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
        assert streamed == whole
    assert wait_idle(group)


@pytest.mark.parametrize("tp, dcp", [(2, 2), (4, 2)])
def test_ranks_that_share_a_cache_answer_like_one(server, launch, tp, dcp):
    group = launch("--selfcheck", "--threads", "1", *rank_flags(tp), "-dcp", str(dcp))
    prompts = questions(8)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        one, other = (list(pool.map(lambda prompt, at=at: answer(at, prompt, logprobs=3)[0], prompts)) for at in (server, group))
    flips = sum(expect_equal_up_to_a_tie(*pair) for pair in zip(one, other))
    print(f"tp {tp}, dcp {dcp}: {flips} of {len(prompts)} replies part from one rank's at a tie")
    assert flips <= len(prompts) // 4
    assert f'dcp_world_size="{dcp}"' in group.get("/metrics")[1].decode()
    assert wait_idle(group)


@pytest.mark.skipif(ON_GPU, reason="the number of GPUs is looked at first")
def test_a_size_that_does_not_divide_is_refused_by_name(launch):
    with pytest.raises(RuntimeError) as refused:
        launch("--tensor-parallel-size", "3")
    assert "exit code 1" in str(refused.value)
    for part in ("--tensor-parallel-size 3: tensor ", " do not divide among 3 ranks; every tensor of this model divides among 1, 2"):
        assert part in str(refused.value), refused.value
    assert " GB (" not in str(refused.value), "weights were read"
