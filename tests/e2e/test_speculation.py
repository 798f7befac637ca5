"""Speculation through HTTP: the replies, stops and log-probabilities of a server without it; several tokens in a chunk."""
import json
import os

import pytest

from conftest import FOLDER, gauge, wait_idle

ON_GPU = "cuda" in os.environ.get("PERIGEE_FLAGS", "")
MODEL = os.path.basename(FOLDER)
CONFIGS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "model": FOLDER + "-eagle3-mla", "draft_attention_backend": "TRITON_MLA",
               "rejection_sample_method": "probabilistic"},
}
COUNTED = []  # of each reply: what it says of drafts
PROMPT = "one two three four. one two three four. one two three"


def answer(server, **fields):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "return_token_ids": True, **fields}
    status, reply = server.post("/v1/completions", body)
    assert status == 200, reply
    usage = reply["usage"]
    COUNTED.append(usage.pop("completion_tokens_details", None))
    return [{key: choice[key] for key in ("text", "token_ids", "logprobs", "finish_reason")} for choice in reply["choices"]], usage


@pytest.mark.parametrize("method", CONFIGS)
def test_replies_are_those_without(server, launch, method):
    drafting = launch("--deterministic", "--selfcheck", "--threads", "1", "--speculative-config", json.dumps(CONFIGS[method]))
    COUNTED.clear()
    if ON_GPU:  # where bits depend on who runs beside in any other mode
        server = launch("--deterministic")
    plain, _ = answer(server, logprobs=2)
    text = plain[0]["text"]
    for fields in ({"logprobs": 2}, {"temperature": 0.8, "seed": 5, "n": 3}, {"max_tokens": 7}, {"min_tokens": 20},
                   {"stop": [text[len(text) // 2:len(text) // 2 + 3]]}, {"presence_penalty": 1.5, "repetition_penalty": 1.2},
                   {"ignore_eos": True, "temperature": 0.5, "seed": 6}):
        assert answer(drafting, **fields) == answer(server, **fields), fields
    metrics = drafting.get("/metrics")[1]
    rows, drafts, accepted = (gauge(metrics, f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens"))
    print(f"{rows:.0f} rows verified {drafts:.0f} tokens and accepted {accepted:.0f}")
    assert 0 < accepted < drafts <= 3 * rows
    told = [counts for counts in COUNTED if counts]
    assert 0 < len(told) <= len(COUNTED) // 2, "replies of the server that drafts"
    assert accepted - 30 <= sum(counts["accepted_prediction_tokens"] for counts in told) <= accepted, "those after a stop are dropped"
    assert wait_idle(drafting)
    assert b"spec_decode" not in server.get("/metrics")[1]
