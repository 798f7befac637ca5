"""Replies of a form are of that form: JSON schemas as response_format and as the arguments of a required tool, plain and
streamed, on trained and random weights, with and without speculation. Under PERIGEE_SOAK all schemas go through all of it,
else each of the sixteen ways takes some of them.
"""
import concurrent.futures
import itertools
import json
import os
import re

import jsonschema
import pytest

from conftest import EDGE_ONLY, FOLDER, ON_GPU, wait_idle
from json_schemas import SCHEMAS, as_parameters

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOAK = "PERIGEE_SOAK" in os.environ
MAX_TOKENS = 160
SERVERS = {
    "trained": [],
    "trained, K = 3": ["--speculative-config", json.dumps({"method": "eagle3", "num_speculative_tokens": 3, "model": FOLDER + "-eagle3-mla"})],
    "random": ["--load-format", "dummy"],
    "random, K = 3": ["--load-format", "dummy", "--speculative-config",
                      json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3})],
}
WAYS = list(itertools.product(("response_format", "tool"), (False, True)))


def events(server, body):
    connection = server.connection()
    connection.request("POST", CHAT, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode()
    assert reply.status == 200, text
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def streamed(server, body):
    """The choice of a streamed reply, put together as a client does."""
    message, finish = {"content": "", "reasoning": "", "tool_calls": []}, None
    for event in events(server, body):
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            for name in ("content", "reasoning"):
                message[name] += choice["delta"].get(name) or ""
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({**piece, "function": {"name": "", "arguments": "", **piece["function"]}})
                else:
                    message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def ask(server, body, stream=False):
    body = {"messages": [{"role": "user", "content": "Hugo earns 15 dollars per hour."}], "max_tokens": MAX_TOKENS, **body}
    if stream:
        return streamed(server, body)
    status, reply = server.post(CHAT, body)
    assert status == 200, (reply, body)
    return reply["choices"][0]


def check_text(text, schema):
    assert "\n" not in text and "\t" not in text, text
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def check_schema(server, index, way, stream):
    schema = SCHEMAS[index] if way == "response_format" else as_parameters(SCHEMAS[index])
    body = {"temperature": 1, "seed": index, "chat_template_kwargs": {"thinking": index % 3 == 0}}
    if way == "response_format":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}
    else:
        body |= {"tools": [{"type": "function", "function": {"name": "take", "parameters": schema}}], "tool_choice": "required"}
    choice = ask(server, body, stream)
    message = choice["message"]
    assert "<|" not in (message["content"] or "") + (message.get("reasoning") or ""), choice
    if way == "response_format":
        assert choice["finish_reason"] == "stop", choice
        return check_text(message["content"], schema)
    assert choice["finish_reason"] == "tool_calls" and message["tool_calls"], choice
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "take" and re.fullmatch(r"functions\.take:[0-9]+", call["id"]), call
        check_text(call["function"]["arguments"], schema)


@pytest.mark.parametrize("kind", SERVERS)
def test_every_reply_validates(launch, kind):
    server = launch("--threads", "1", *SERVERS[kind])
    begin = list(SERVERS).index(kind)
    cases = [(index, way, stream) for index in range(len(SCHEMAS)) for at, (way, stream) in enumerate(WAYS)
             if SOAK or index % 16 == begin * 4 + at]
    faults = []

    def run(case):
        try:
            check_schema(server, *case)
        except Exception as fault:  # all of them are wanted, not the first
            faults.append(f"{case} {json.dumps(SCHEMAS[case[0]], ensure_ascii=False)}: {fault!r:.400}")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(run, cases))
    assert not faults, f"{len(faults)} of {len(cases)}:\n" + "\n".join(sorted(faults)[:20])
    assert wait_idle(server)
    print(f"{kind}: {len(cases)} replies valid")


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"], "additionalProperties": False}}}
CLOCK = {"type": "function", "function": {"name": "tell-time.now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
QUIET = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def random_server(tmp_path_factory):
    """Random weights: what is right of its replies is so by the form alone."""
    from conftest import start

    with start(tmp_path_factory, "--threads", "1", "--load-format", "dummy") as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("form, check", [
    ({"choice": ["red", "green", "bl\"ue", "蓝"]}, lambda text: text in ("red", "green", "bl\"ue", "蓝")),
    ({"regex": "[a-c]{2,4}-[0-9]+"}, lambda text: re.fullmatch("[a-c]{2,4}-[0-9]+", text)),
    ({"grammar": "root ::= \"(\" root \")\" | [0-9]"}, lambda text: re.fullmatch(r"(\(*)[0-9](\)*)", text) and text.count("(") == text.count(")")),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 5}}, lambda text: json.loads(text) in (3, 4, 5)),
    ({"json": json.dumps({"const": "x"})}, lambda text: json.loads(text) == "x"),
])
@pytest.mark.parametrize("thinking", [True, False])
def test_other_forms(random_server, form, check, thinking):
    kwargs = {"chat_template_kwargs": {"thinking": thinking}}
    (name, value), = form.items()
    older = {"guided_" + name: value} if name != "json_object" else {"response_format": {"type": "json_object"}}
    for seed, body in enumerate(({"structured_outputs": form}, older)):
        choice = ask(random_server, {**body, **kwargs, "seed": seed, "n": 1})
        assert choice["finish_reason"] == "stop" and check(choice["message"]["content"]), choice
        assert bool(choice["message"].get("reasoning")) == thinking
    status, reply = random_server.post(COMPLETIONS, {"prompt": "one two", "max_tokens": 60, "n": 3, "structured_outputs": form})
    assert status == 200, reply
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "stop" and check(choice["text"]), choice


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


DIGITS, WORD_TAG = {"type": "regex", "pattern": "[0-9]{1,4}"}, {"type": "grammar", "grammar": "root ::= [a-z] | [a-z] root"}
SMALL = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
                                                "required": ["n"], "additionalProperties": False}}


# Structural tags are xgrammar's: regular expressions, grammars and schemas between marks of text, in a row and by choice.
@pytest.mark.parametrize("form, pattern", [
    (tag("<a>", DIGITS, "</a>"), r"<a>[0-9]{1,4}</a>"),
    (tag("<w>", WORD_TAG, "</w>"), r"<w>[a-z]+</w>"),
    (tag("<j>", SMALL, "</j>"), r'<j>\{"n": ?[0-9]{1,2}\}</j>'),
    ({"type": "sequence", "elements": [tag("<a>", DIGITS, "</a>"), {"type": "const_string", "value": " then "}, tag("<w>", WORD_TAG, "</w>")]},
     r"<a>[0-9]{1,4}</a> then <w>[a-z]+</w>"),
    ({"type": "or", "elements": [tag("<a>", DIGITS, "</a>"), tag("<w>", WORD_TAG, "</w>")]}, r"<a>[0-9]{1,4}</a>|<w>[a-z]+</w>"),
])
def test_structural_tags(random_server, form, pattern):
    for seed in range(4):
        body = {"prompt": "one", "max_tokens": 40, "seed": seed, "structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}
        status, reply = random_server.post(COMPLETIONS, body)
        assert status == 200, reply
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


# Whatever comes before a trigger; after it, its tag.
def test_triggers_of_structural_tags(random_server):
    form = {"type": "triggered_tags", "triggers": ["<a", "<w"], "tags": [tag("<a>", DIGITS, "</a>"), tag("<w>", WORD_TAG, "</w>")]}
    status, reply = random_server.post("/tokenize", {"prompt": "<"})
    assert status == 200
    for seed in range(6):
        body = {"prompt": "one", "max_tokens": 60, "seed": seed, "logit_bias": {str(reply["tokens"][0]): 8},
                "structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}
        status, answer = random_server.post(COMPLETIONS, body)
        assert status == 200, answer
        text = answer["choices"][0]["text"]
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        left = re.sub(r"<a>[0-9]{1,4}</a>|<w>[a-z]+</w>", "", text)
        assert "<a" not in left and "<w" not in left, text


def test_stop_cuts_a_form(random_server):
    status, reply = random_server.post(COMPLETIONS, {"prompt": "one", "max_tokens": 60, "stop": ["e"], "structured_outputs": {"choice": ["green"]}})
    assert status == 200 and reply["choices"][0]["text"] == "gr" and reply["choices"][0]["stop_reason"] == "e", reply


def test_calls_on_random_weights(random_server):
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
    named = {"type": "function", "function": {"name": "tell-time.now"}}
    for seed, (stream, choice, parallel) in enumerate(itertools.product((False, True), ("required", named), (True, False))):
        body = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed, "temperature": 1}
        got = ask(random_server, body, stream)
        calls = got["message"]["tool_calls"]
        assert got["finish_reason"] == "tool_calls" and calls and not got["message"]["content"], got
        assert len(calls) == 1 or (parallel and choice == "required"), got
        assert len({call["id"] for call in calls}) == len(calls), got
        for call in calls:
            name = call["function"]["name"]
            assert name in schemas and (choice == "required" or name == "tell-time.now"), got
            check_text(call["function"]["arguments"], schemas[name])


def test_tools_of_system_messages_can_be_required(random_server):
    for messages in ([{"role": "system", "content": "", "tools": [WEATHER]}, {"role": "user", "content": "x"}],
                     [{"role": "user", "content": "x"}, {"role": "system", "tools": [WEATHER]}]):
        calls = ask(random_server, {"messages": messages, "tool_choice": "required", **QUIET})["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"get_weather"}
    status, reply = random_server.post(CHAT, {"messages": messages, "tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}})
    assert status == 200 and [call["function"]["name"] for call in reply["choices"][0]["message"]["tool_calls"]] == ["get_weather"]


# The opening markers of a call, forced by a bias: what follows is free but for the form.
def test_a_call_that_begins_by_itself_is_a_declared_one(random_server):
    status, reply = random_server.post("/tokenize", {"prompt": "<|tool_calls_section_begin|>"})
    assert status == 200
    (section,) = reply["tokens"]
    for seed in range(4):
        choice = ask(random_server, {"tools": [WEATHER, CLOCK], "logit_bias": {str(section): 100}, "seed": seed, **QUIET})
        calls = choice["message"]["tool_calls"]
        assert calls and choice["finish_reason"] == "tool_calls", choice
        for call in calls:
            tool = next(tool for tool in (WEATHER, CLOCK) if tool["function"]["name"] == call["function"]["name"])
            check_text(call["function"]["arguments"], tool["function"]["parameters"])


def test_the_form_begins_after_the_reasoning(server):
    body = {"messages": [{"role": "user", "content": "Hugo earns 15 dollars per hour and works 9 hours. How many dollars does Hugo earn?"}],
            "temperature": 0, "max_tokens": 256,
            "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": {
                "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}}}}
    choice = ask(server, body)
    assert "135" in choice["message"]["reasoning"], choice
    assert isinstance(json.loads(choice["message"]["content"])["answer"], int)
    usage = server.post(CHAT, body)[1]["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


@pytest.mark.skipif(ON_GPU, reason="bits depend on who runs beside")
def test_speculation_changes_no_reply_of_a_form(server, launch):
    drafting = launch("--deterministic", "--threads", "1", *SERVERS["trained, K = 3"])
    for index in range(0, len(SCHEMAS), 1 if SOAK else 20):
        body = {"temperature": 1, "seed": index, **QUIET,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[index]}}}
        assert ask(drafting, body) == ask(server, body), SCHEMAS[index]


def schema_format(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 6}}, "required": ["age", "name"],
          "additionalProperties": False}
END_ID = "2050"  # <|im_end|> of the bundled models
SAMPLING = [{"temperature": 0}, {"temperature": 100}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"presence_penalty": 2, "frequency_penalty": 2},
            {"presence_penalty": -2, "frequency_penalty": -2}, {"repetition_penalty": 100, "temperature": 0}, {"logit_bias": {END_ID: 100}},
            {"logit_bias": {END_ID: -100}}, {"logit_bias": {str(id): -100 for id in range(300)}}, {"min_tokens": 40}, {"n": 3},
            {"logprobs": True, "top_logprobs": 2}, {"skip_special_tokens": False}]


def form_of_person(way):
    if way == "response_format":
        return schema_format(PERSON)
    return {"tools": [{"type": "function", "function": {"name": "take", "parameters": PERSON}}], "tool_choice": "required"}


def check_person(choice):
    calls = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop"), choice
    for text in [call["function"]["arguments"] for call in calls] or [choice["message"]["content"]]:
        check_text(text, PERSON)


@pytest.mark.parametrize("way", ["response_format", "tool"])
def test_a_form_holds_however_ids_are_sampled(random_server, way):
    for seed, sampling in enumerate(SAMPLING):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 120, "seed": seed, **form_of_person(way), **sampling}
        status, reply = random_server.post(CHAT, {**body, "chat_template_kwargs": {"thinking": seed % 2 == 0}})
        assert status == 200, (sampling, reply)
        for choice in reply["choices"]:
            check_person(choice)


# From one on: too few are a 400, and as soon as a reply fits it is whole.
@pytest.mark.parametrize("way", ["response_format", "tool"])
@pytest.mark.parametrize("thinking", [False, True])
def test_any_max_tokens_is_too_small_or_enough(random_server, way, thinking):
    fit = []
    for max_tokens in range(1, 32):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "seed": max_tokens, **form_of_person(way)}
        status, reply = random_server.post(CHAT, {**body, "chat_template_kwargs": {"thinking": thinking}})
        fit.append(status == 200)
        if status == 200:
            check_person(reply["choices"][0])
        else:
            assert status == 400 and reply["error"]["param"] == "max_tokens", reply
    assert fit == sorted(fit) and not fit[0] and fit[-1], fit


HOSTILE = {
    "unknown type": (schema_format({"type": "strnig"}), "response_format.json_schema.schema"),
    "unresolved reference": (schema_format({"$ref": "#/$defs/Nothing"}), "response_format.json_schema.schema"),
    "foreign reference": (schema_format({"$ref": "https://example.com/schema.json"}), "response_format.json_schema.schema"),
    "endless": (schema_format({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "response_format.json_schema.schema"),
    "nothing": (schema_format({"type": "integer", "minimum": 5, "maximum": 4}), "response_format.json_schema.schema"),
    "unclosed regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    "bad grammar": ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs.grammar"),
    "not a schema": ({"guided_json": "{"}, "guided_json"),
    "huge count": (schema_format({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}), "response_format.json_schema.schema"),
    "longer than max_tokens": ({**schema_format({"type": "string", "minLength": 1000}), "max_tokens": 50}, "max_tokens"),
    "bogus format": ({"response_format": {"type": "bogus"}}, "response_format.type"),
    "no name": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    "two forms": ({**schema_format({}), "guided_choice": ["a"]}, "guided_choice"),
    "form and calls": ({**schema_format({}), "tools": [WEATHER], "tool_choice": "required"}, "response_format.json_schema.schema"),
    "no end": ({**schema_format({}), "ignore_eos": True}, "ignore_eos"),
    "undeclared": ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    "strict": ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "strnig"}}}]}, "tools[0].function"),
}


@EDGE_ONLY
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_forms_that_cannot_be_had_are_400_before_the_first_byte(server, name, stream):
    members, field = HOSTILE[name]
    status, reply = server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, **members, "stream": stream})
    assert status == 400, reply
    error = reply["error"]
    assert error["param"] == field and field in error["message"], error
    if name == "longer than max_tokens":
        assert re.search(r"\b50\b", error["message"]) and re.search(r"\b1[0-9]{3}\b|\b[0-9]{3}\b", error["message"]), error
