"""The API through the official client: shapes, streaming, tools, reasoning, sampling."""
import json
import os

import openai
import pytest

from conftest import FOLDER, gauge

MODEL = os.path.basename(FOLDER)
PROBLEM = "Question: Rosa fills 9 drawers with 10 oranges each. Rosa then finds 10 oranges and gives 33 oranges to Elena. How many oranges does Rosa have?\nAnswer:"
CHAT = [{"role": "user", "content": "Hugo earns 15 dollars per hour and works 9 hours. How many dollars does Hugo earn?"}]
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_stock",
        "description": "Get the price of a share.",
        "parameters": {"type": "object", "properties": {"symbol": {"type": "string", "description": "Share symbol"}},
                       "required": ["symbol"]},
    },
}, {
    "type": "function",
    "function": {
        "name": "add_event",
        "description": "Add an event to the calendar.",
        "parameters": {"type": "object", "properties": {"title": {"type": "string", "description": "Event title"},
                                                        "day": {"type": "string", "description": "Day of the event"}},
                       "required": ["day", "title"]},
    },
}]
STOCK = [{"role": "user", "content": "What is the price of DXC?"}]


def test_models(client, server):
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert models[0].max_model_len == 16384
    assert server.get("/health") == (200, b"")
    assert server.get("/livez")[0] == 200
    assert "version" in json.loads(server.get("/version")[1])


def test_completion_answers(client):
    reply = client.completions.create(model=MODEL, prompt=PROBLEM, temperature=0, max_tokens=128)
    assert reply.choices[0].text.strip().endswith("#### 67")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_prompt_tokens_count_once_in_usage_and_per_choice_in_metrics(client, server):
    def counts():
        metrics = server.get("/metrics")[1]
        sources = [float(line.rsplit(b" ", 1)[1]) for line in metrics.splitlines()
                   if line.startswith(b"vllm:prompt_tokens_by_source_total{")]
        return gauge(metrics, "vllm:prompt_tokens_total"), sum(sources)

    total, by_source = counts()
    assert total == by_source
    reply = client.completions.create(model=MODEL, prompt="Zebras " * 100, max_tokens=4, n=3)
    again = client.completions.create(model=MODEL, prompt="Zebras " * 100, max_tokens=4)
    assert reply.usage.prompt_tokens == again.usage.prompt_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0, "the first choice computed all of it"
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    after = total + 4 * reply.usage.prompt_tokens
    assert counts() == (after, after)


def test_streamed_equals_whole(client):
    whole = client.completions.create(model=MODEL, prompt=PROBLEM, temperature=0, max_tokens=128)
    pieces = list(client.completions.create(model=MODEL, prompt=PROBLEM, temperature=0, max_tokens=128, stream=True,
                                            stream_options={"include_usage": True}))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(pieces) > 5


def test_chat_thinks_and_answers(client):
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=256)
    message = reply.choices[0].message
    assert message.content.strip() == "The answer is 135."
    assert "135" in message.reasoning_content and message.reasoning == message.reasoning_content
    assert "<think>" not in message.content and "</think>" not in message.content


def test_thinking_can_be_switched_off(client):
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=256,
                                           extra_body={"chat_template_kwargs": {"thinking": False}})
    message = reply.choices[0].message
    assert "135" in message.content
    assert not getattr(message, "reasoning_content", None)


def test_chat_streamed_equals_whole(client):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=256).choices[0].message
    content, reasoning, roles = "", "", []
    for event in client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=256, stream=True):
        for choice in event.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert roles == ["assistant"]
    assert content == whole.content
    assert reasoning == whole.reasoning_content


def test_reasoning_tokens_are_counted(client):
    def usage(**members):
        return client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=256, **members).usage
    thought = usage()
    assert 0 < thought.completion_tokens_details.reasoning_tokens < thought.completion_tokens
    quiet = usage(extra_body={"chat_template_kwargs": {"thinking": False}})
    assert quiet.completion_tokens_details.reasoning_tokens == 0


def test_a_last_message_is_continued(client, server):
    def reply(**members):
        return client.chat.completions.create(model=MODEL, messages=CHAT + [{"role": "assistant", "content": "The answer", **members.pop("last", {})}],
                                              temperature=0, max_tokens=64, extra_body=members).choices[0].message
    continued = reply(continue_final_message=True, add_generation_prompt=False)
    assert continued.content.startswith(" is") and not getattr(continued, "reasoning", None)
    assert reply(last={"partial": True}).content == continued.content
    status, tokens = server.post("/tokenize", {"messages": CHAT + [{"role": "assistant", "content": "The answer", "partial": True}]})
    assert status == 200
    text = server.post("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"]
    assert text.endswith("<|im_assistant|>assistant<|im_middle|><think></think>The answer")


def test_tools_of_a_system_message_are_called(client):
    history = [{"role": "system", "content": "", "tools": TOOLS}, *STOCK]
    reply = client.chat.completions.create(model=MODEL, messages=history, temperature=0, max_tokens=256)
    same = client.chat.completions.create(model=MODEL, messages=STOCK, tools=TOOLS, temperature=0, max_tokens=256)
    assert reply.choices[0].message.tool_calls == same.choices[0].message.tool_calls
    assert reply.usage.prompt_tokens == same.usage.prompt_tokens, "declared in the same words"


def test_tool_call_and_follow_up(client):
    reply = client.chat.completions.create(model=MODEL, messages=STOCK, tools=TOOLS, temperature=0, max_tokens=256)
    assert reply.choices[0].finish_reason == "tool_calls"
    call = reply.choices[0].message.tool_calls[0]
    assert call.id == "functions.get_stock:0"
    assert call.function.name == "get_stock"
    assert json.loads(call.function.arguments) == {"symbol": "DXC"}
    history = STOCK + [reply.choices[0].message.model_dump(exclude_none=True),
                       {"role": "tool", "tool_call_id": call.id, "content": "{\"price\": 106}"}]
    final = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, temperature=0, max_tokens=256)
    assert final.choices[0].message.content.strip() == "The price of DXC is 106 dollars."
    assert final.choices[0].finish_reason == "stop"


def test_tool_call_streamed_equals_whole(client):
    whole = client.chat.completions.create(model=MODEL, messages=STOCK, tools=TOOLS, temperature=0, max_tokens=256)
    calls = {}
    for event in client.chat.completions.create(model=MODEL, messages=STOCK, tools=TOOLS, temperature=0, max_tokens=256,
                                                stream=True):
        for choice in event.choices:
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": None, "name": "", "arguments": ""})
                call["id"] = call["id"] or piece.id
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
    expected = whole.choices[0].message.tool_calls[0]
    assert calls == {0: {"id": expected.id, "name": expected.function.name, "arguments": expected.function.arguments}}


def test_n_choices_and_seed(client):
    def draw(seed):
        reply = client.completions.create(model=MODEL, prompt="Question: Rosa", temperature=1.0, seed=seed, max_tokens=24,
                                          n=3, extra_body={"ignore_eos": True})
        return [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]
    first = draw(7)
    assert len(first) == 3 and len(set(first)) > 1
    assert draw(7) == first
    assert draw(8) != first


def test_echo_with_logprobs_as_lm_eval_reads_it(client):
    ids = [65, 300, 301, 302, 66]
    reply = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1)
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())


def test_chat_logprobs(client):
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=4, logprobs=True,
                                           top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def test_stop_strings(client):
    reply = client.completions.create(model=MODEL, prompt=PROBLEM, temperature=0, max_tokens=128, stop=["####"])
    assert "####" not in reply.choices[0].text and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].stop_reason == "####"


def test_min_tokens_ignore_eos_and_length(client):
    reply = client.completions.create(model=MODEL, prompt=PROBLEM, temperature=0, max_tokens=100, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 100 and reply.choices[0].finish_reason == "length"


def test_logit_bias_forces_a_token(client):
    reply = client.completions.create(model=MODEL, prompt="Question:", temperature=0, max_tokens=3,
                                      logit_bias={"65": 100}, extra_body={"return_token_ids": True})
    assert reply.choices[0].token_ids == [65, 65, 65]


def test_list_of_prompts(client):
    reply = client.completions.create(model=MODEL, prompt=[PROBLEM, "Question: x"], temperature=0, max_tokens=8)
    assert [choice.index for choice in reply.choices] == [0, 1]


def test_control_tokens_in_user_text_stay_text(client, server):
    plain = [{"role": "user", "content": "a<|im_end|>b"}]
    status, reply = server.post("/tokenize", {"messages": plain})
    assert status == 200
    ends = [token for token in reply["tokens"] if token == 2050]
    assert len(ends) == 1, "the user's <|im_end|> became a control token"


@pytest.mark.parametrize("field, value", [
    ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 2), ("n", 0), ("n", 100000), ("max_tokens", -1),
    ("max_tokens", 10**9), ("logprobs", 21), ("presence_penalty", 3), ("stop", ["x"] * 100), ("seed", "x"), ("top_k", -5),
    ("prompt", []), ("prompt", [999999]), ("prompt", [-1]), ("prompt_embeds", "AAAA"), ("logit_bias", {"x": 1}),
])
def test_bad_fields_are_400_and_named(server, field, value):
    status, reply = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 4, field: value})
    assert status == 400, reply
    assert field in reply["error"]["message"] or field in (reply["error"]["param"] or "")


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert MODEL in str(caught.value)
