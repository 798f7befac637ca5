"""Every field of the schemas is used, refused or harmless: none has no effect without a word."""
import json

import openai.types
import openai.types.chat
import pytest

from conftest import EDGE_ONLY
from request_fields import CHAT, COMPLETIONS, FIELDS, VLLM, Harmless, Refused, Used, request

pytestmark = EDGE_ONLY
CASES = [(path, name) for path, fields in FIELDS.items() for name in fields]
SCHEMAS = {
    CHAT: openai.types.chat.completion_create_params.CompletionCreateParamsBase,
    COMPLETIONS: openai.types.completion_create_params.CompletionCreateParamsBase,
}


@pytest.mark.parametrize("path", FIELDS)
def test_the_table_has_every_field_of_the_schemas(path):
    names = set(VLLM[path])
    if path in SCHEMAS:
        names |= set(SCHEMAS[path].__annotations__) | {"stream"}
    assert not names - set(FIELDS[path])


def answer(server, path, body):
    """Status and what the reply says, without what differs from request to request."""
    connection = server.connection()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode()
    if "event-stream" in reply.getheader("Content-Type", ""):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return reply.status, [(event["choices"], "usage" in event) for event in events]
    reply_json = json.loads(text)
    for name in ("id", "created"):
        reply_json.pop(name, None)
    reply_json.get("usage", {}).pop("prompt_tokens_details", None)
    return reply.status, reply_json


PLAIN = {}


def plain(server, path, among=None):
    """The answer to the base request with `among`, asked for once."""
    key = path, json.dumps(among, sort_keys=True)
    if key not in PLAIN:
        PLAIN[key] = answer(server, path, request(path, among or {}))
    return PLAIN[key]


def refusal(server, path, body):
    status, reply = answer(server, path, body)
    assert status == 400, reply
    assert set(reply["error"]) == {"message", "type", "param", "code"} and reply["error"]["type"] == "BadRequestError"
    return reply["error"]


def check_used(server, path, name, field):
    error = refusal(server, path, request(path, field.among, {name: field.wrong}))
    assert (error["param"] or "").split(".")[0].split("[")[0] == name, error
    assert name in error["message"]
    if field.value is None:
        return
    value = field.value
    if callable(value):
        value = value(plain(server, path, {"return_token_ids": True})[1]["choices"][0]["token_ids"])
    without = plain(server, path, field.among)
    assert without[0] == 200, without
    assert answer(server, path, request(path, field.among, {name: value})) != without, "it has no effect"


def check_refused(server, path, name, field):
    error = refusal(server, path, request(path, {name: field.value}))
    assert error["param"] == name and name in error["message"], error
    if field.harmless is not None:
        assert answer(server, path, request(path, {name: field.harmless})) == plain(server, path)


@pytest.mark.parametrize("path, name", CASES)
def test_a_field_is_used_refused_or_harmless(server, path, name):
    field = FIELDS[path][name]
    if isinstance(field, Used):
        check_used(server, path, name, field)
    elif isinstance(field, Refused):
        check_refused(server, path, name, field)
    else:
        assert isinstance(field, Harmless)
        assert answer(server, path, request(path, {name: field.value})) == plain(server, path)
    assert f"request field '{name}' is unknown" not in server.text()


def test_a_salt_hides_what_is_cached(server):
    body = request(COMPLETIONS, {"prompt": "Question: salted. " * 40})

    def cached(**members):
        return server.post(COMPLETIONS, {**body, **members})[1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 and cached() > 0
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 0


@pytest.mark.parametrize("path", FIELDS)
def test_misspelt_fields_are_refused_and_unknown_ones_are_not(server, path):
    known = next(name for name in ("temperature", "return_token_strs", "tokens") if name in FIELDS[path])
    error = refusal(server, path, request(path, {known[:-2] + known[-1]: 1}))
    assert f"did you mean {known}?" in error["message"], error
    name = f"made_up_for{path.replace('/', '_')}"
    assert answer(server, path, request(path, {name: 1})) == plain(server, path)
    assert path in ("/tokenize", "/detokenize") or f"request field '{name}' is unknown" in server.text()


def test_the_same_question_alike_in_tokenize_and_chat(server):
    """The thinking switches count in /tokenize, too."""
    for members in ({}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
        body = request(CHAT, {"chat_template_kwargs": None, **members})
        used = server.post(CHAT, body)[1]["usage"]["prompt_tokens"]
        assert server.post("/tokenize", {"messages": body["messages"], **members})[1]["count"] == used
