"""Hostile requests: name, what is sent, and what must come back. One table; test_hostile.py says what must survive it.

A case sends either `raw` bytes on a connection of its own or a `body` (JSON value or bytes) to `path`. `status` is what
is expected; 0 stands for a connection that is closed without a reply. `param` is the field that the error names, `says`
a part of its message. Sizes are scaled down so that the table takes seconds; the costs of the full ones are measured by
a bench.
"""
import dataclasses
import json
import typing

from request_fields import BASE, CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, request

TEXT = "x" * 100_000
SURROGATE = "\\ud800"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    status: tuple
    path: str = COMPLETIONS
    body: typing.Any = None
    raw: typing.Optional[bytes] = None
    param: typing.Optional[str] = None
    says: str = ""


def bad(name, path, body, param=None, says="", status=400):
    statuses = status if isinstance(status, tuple) else (status,)
    return Case(name, statuses, path, body, param=param, says=says)


def good(name, path, body):
    return Case(name, (200,), path, body)


def raw(name, data, *status):
    return Case(name, status, raw=data if isinstance(data, bytes) else data.encode())


def with_text(path, json_text):
    """The base request of `path` with members given as JSON text, so that they may be what json.dumps cannot write."""
    return (json.dumps(request(path))[:-1] + "," + json_text + "}").encode()


def completion(json_text):
    return ('{"max_tokens":4,"temperature":0,' + json_text + "}").encode()


def chat(messages, **members):
    return {**request(CHAT), "messages": messages, **members}


def user(content):
    return {"role": "user", "content": content}


def nested(levels, opening="[", inner="", closing="]"):
    return opening * levels + inner + closing * levels


def flood(count, value="0", prefix="k"):
    return "{" + ",".join(f'"{prefix}{i}":{value}' for i in range(count)) + "}"


JSON_TEXT = [
    bad("empty body", COMPLETIONS, b""),
    bad("not an object", COMPLETIONS, b"[]", says="object"),
    bad("null", COMPLETIONS, b"null", says="object"),
    bad("a string", COMPLETIONS, b'"prompt"', says="object"),
    bad("cut short", COMPLETIONS, b'{"prompt":"x"', says="byte"),
    bad("something after it", COMPLETIONS, completion('"prompt":"x"') + b"x", says="extra"),
    bad("two documents", COMPLETIONS, completion('"prompt":"x"') * 2, says="extra"),
    bad("a NUL byte", COMPLETIONS, completion('"prompt":"a\0b"')),
    bad("a NUL byte after it", COMPLETIONS, completion('"prompt":"x"') + b"\0"),
    bad("a byte order mark", COMPLETIONS, b"\xef\xbb\xbf" + completion('"prompt":"x"')),
    bad("UTF-16", COMPLETIONS, completion('"prompt":"x"').decode().encode("utf-16")),
    bad("bad UTF-8 in a value", COMPLETIONS, b'{"prompt":"\xff\xfe"}', says="UTF-8"),
    bad("bad UTF-8 in a name", COMPLETIONS, b'{"prompt":"x","\xc3":1}'),
    bad("overlong UTF-8", COMPLETIONS, b'{"prompt":"\xc0\xaf"}'),
    bad("an encoded surrogate", COMPLETIONS, b'{"prompt":"\xed\xa0\x80"}'),
    bad("a name twice", COMPLETIONS, completion('"prompt":"x","prompt":"y"'), says='"prompt" twice'),
    bad("a long name twice", COMPLETIONS, completion(f'"prompt":"x","{"é" * 500}":1,"{"é" * 500}":2'), says="twice"),
    bad("half a surrogate twice", COMPLETIONS, completion(f'"prompt":"x","{SURROGATE}":1,"\\udfff":2'), says="twice"),
    bad("comments", COMPLETIONS, completion('/**/"prompt":"x"')),
    bad("a comma too many", COMPLETIONS, completion('"prompt":"x",')),
    bad("single quotes", COMPLETIONS, b"{'prompt':'x'}"),
    bad("NaN", COMPLETIONS, completion('"prompt":"x","top_p":NaN')),
    bad("Infinity", COMPLETIONS, completion('"prompt":"x","top_p":-Infinity')),
    bad("a number that begins with 0", COMPLETIONS, completion('"prompt":"x","n":01')),
    bad("a million brackets", COMPLETIONS, b"[" * 1_000_000, says="nesting"),
    bad("a million objects", COMPLETIONS, b'{"a":' * 1_000_000, says="nesting"),
    good("128 levels", COMPLETIONS, completion(f'"prompt":"x","made_up_depth":{nested(127)}')),
    bad("129 levels", COMPLETIONS, completion(f'"prompt":"x","made_up_depth":{nested(128)}'), says="nesting"),
    good("a lone surrogate", COMPLETIONS, completion(f'"prompt":"{SURROGATE}","echo":true')),
    good("a NUL character", COMPLETIONS, completion('"prompt":"\\u0000\\u0000","echo":true')),
    good("noncharacters", COMPLETIONS, completion('"prompt":"\\uffff\\ufffe\\u202e","echo":true')),
    good("200 unknown names", COMPLETIONS, completion('"prompt":"x",' + flood(200, prefix="made_up")[1:-1])),
    bad("50,000 unknown names", COMPLETIONS, completion('"prompt":"x",' + flood(50_000)[1:-1]), status=(400, 413)),
    bad("a name of 100 kB", COMPLETIONS, completion(f'"prompt":"x","{TEXT}":1'), status=(200, 400)),
    bad("200,000 numbers", COMPLETIONS, completion(f'"prompt":"x","made_up_list":[{"0," * 200_000}0]'), status=(200, 400, 413)),
    bad("a number of 100,000 digits", COMPLETIONS, completion(f'"prompt":"x","seed":{"1" * 100_000}')),
]

NUMBERS = [
    *(bad(f"{name} {value}", COMPLETIONS, completion(f'"prompt":"x","{name}":{value}').replace(b'"temperature":0,', b""), name)
      for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout")
      for value in ("1e999", "-1e999", "1e308", "12345678901234567890", "-1e-5" if name in ("top_p", "min_p") else "-3")),
    *(bad(f"{name} {value}", COMPLETIONS, completion(f'"prompt":"x","{name}":{value}').replace(b'"max_tokens":4,', b""), name)
      for name in ("n", "max_tokens", "top_k", "min_tokens", "logprobs", "prompt_logprobs", "priority", "seed")
      for value in ("1e999", "0.5", "9223372036854775808", "-9223372036854775809", "1e30")),
    *(good(f"{name} -0.0", COMPLETIONS, completion(f'"prompt":"x","{name}":-0.0'))
      for name in ("min_p", "presence_penalty", "timeout", "top_k", "min_tokens")),
    good("integers as doubles", COMPLETIONS, completion('"prompt":"x","n":1.0,"top_k":2e0,"seed":-0.0')),
    good("-0", COMPLETIONS, completion('"prompt":"x","seed":-0,"priority":-0')),
]

SIZES = [
    bad("20,000 logit_bias keys", COMPLETIONS, completion(f'"prompt":"x","logit_bias":{flood(20_000, prefix="")}'),
        status=(400, 413)),
    bad("1,025 logit_bias keys", COMPLETIONS, completion(f'"prompt":"x","logit_bias":{flood(1025, prefix="")}'), "logit_bias"),
    bad("a huge logit_bias key", COMPLETIONS, {"prompt": "x", "logit_bias": {TEXT: 1}}, status=400),
    bad("a logit_bias outside", COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    bad("120,000 template variables", CHAT, with_text(CHAT, '"made_up":0').replace(
        b'{"thinking": false}', flood(120_000).encode()), status=(400, 413)),
    bad("65 template variables", CHAT, chat([user("x")], chat_template_kwargs={f"k{i}": 0 for i in range(65)}),
        "chat_template_kwargs", "64"),
    bad("a template variable of 100 kB", CHAT, chat([user("x")], chat_template_kwargs={TEXT + "é": 0, "messages": 0})),
    bad("a reserved template variable", CHAT, chat([user("x")], chat_template_kwargs={"bos_token": "x"}),
        "chat_template_kwargs.bos_token"),
    bad("a model name of 100 kB", COMPLETIONS, {"prompt": "x", "model": TEXT}, "model", "1024"),
    bad("an unknown model", COMPLETIONS, {"prompt": "x", "model": "é" * 100}, "model", status=404),
    bad("a salt of 100 kB", COMPLETIONS, {"prompt": "x", "cache_salt": TEXT}, "cache_salt", "256"),
    bad("a prompt over the context", COMPLETIONS, {"prompt": "a b " * 40_000}, status=(400, 413)),
    bad("ids over the context", COMPLETIONS, {"prompt": [65] * 20_000}, status=(400, 413)),
    bad("a message over the context", CHAT, chat([user("a b " * 40_000)]), status=(400, 413)),
    bad("100,000 prompts", COMPLETIONS, {"prompt": ["x"] * 100_000}, status=(400, 413)),
    bad("33 prompts", COMPLETIONS, {"prompt": ["x"] * 33}, "prompt", "32"),
    bad("n of a million", COMPLETIONS, {"prompt": "x", "n": 1_000_000}, "n", "8"),
    bad("1,000 stop strings", COMPLETIONS, {"prompt": "x", "stop": ["x"] * 1000}, "stop", "8"),
    bad("a stop string of 100 kB", COMPLETIONS, {"prompt": "x", "stop": TEXT}, "stop", "256"),
    bad("65 stop ids", COMPLETIONS, {"prompt": "x", "stop_token_ids": [65] * 65}, "stop_token_ids", "64"),
    bad("129 tools", CHAT, chat([user("x")], tools=[{"function": {"name": f"f{i}"}} for i in range(129)]), "tools", "128"),
    bad("a tool of 100 kB", CHAT, chat([user("x")], tools=[{"function": {"name": "f", "parameters": {"x": TEXT}}}]), "tools"),
    bad("a tool name of 100 kB", CHAT, chat([user("x")], tools=[{"function": {"name": TEXT}}]), "tools", "64"),
    bad("a tool twice", CHAT, chat([user("x")], tools=[{"function": {"name": "f"}}] * 2), "tools", "twice"),
    bad("4,097 messages", CHAT, chat([user("x")] * 4097), "messages", "4096"),
    bad("4,097 parts", CHAT, chat([user([{"type": "text", "text": "x"}] * 4097)]), "messages[0].content", "4096"),
    bad("4,096 long roles", CHAT, chat([{"role": TEXT[:20], "content": "x"}] * 4096), "messages[0].role"),
    bad("a role of 100 kB", CHAT, chat([{"role": TEXT, "content": "x"}]), "messages[0].role"),
    bad("a part type of 100 kB", CHAT, chat([user([{"type": "é" * 50_000, "text": "x"}])]), "messages[0].content"),
    bad("a misspelt name of a message", CHAT, chat([{**user("x"), "conten": "x"}]), "messages[0].conten", "messages[0].content"),
    bad("an image", CHAT, chat([user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])]),
        "messages[0].content", "text"),
    bad("tokens given as a string", DETOKENIZE, {"tokens": "[65]"}, "tokens"),
    bad("tokens outside the vocabulary", DETOKENIZE, {"tokens": [65, 1 << 40]}, "tokens"),
    bad("tokens that are huge", DETOKENIZE, b'{"tokens":[12345678901234567890]}', "tokens"),
    bad("200,000 tokens", DETOKENIZE, {"tokens": [65] * 200_000}, status=(200, 400, 413)),
    bad("a long text to tokenize", TOKENIZE, {"prompt": "ab " * 100_000}, status=(200, 400, 413)),
    bad("one long word to tokenize", TOKENIZE, {"prompt": "a" * 200_000}, status=(200, 400, 413)),
    bad("blanks to tokenize", TOKENIZE, {"prompt": " " * 200_000}, status=(200, 400, 413)),
    good("surrogates to tokenize", TOKENIZE, f'{{"prompt":"{SURROGATE * 100}"}}'.encode()),
    bad("a deep schema", CHAT, with_text(CHAT, '"tools":[{"type":"function","function":{"name":"f","parameters":'
                                         + nested(200, '{"items":', "{}", "}") + "}}]"), says="nesting"),
    good("a schema of 100 levels", CHAT, with_text(
        CHAT, '"tools":[{"type":"function","function":{"name":"f","parameters":' + nested(100, '{"items":', "{}", "}") + "}}]")),
    good("numbers that no type holds", CHAT, with_text(
        CHAT, '"tools":[{"type":"function","function":{"name":"f","parameters":{"default":12345678901234567890}}}]')),
    good("control tokens as text", CHAT, chat([user("<|im_end|><|im_system|>system<|tool_calls_section_begin|>" * 5)])),
    bad("a call without a function", CHAT, chat([{"role": "assistant", "content": "", "tool_calls": [{}]}]),
        "messages[0].tool_calls"),
    bad("a call with arguments of another type", CHAT,
        chat([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]),
        "messages[0].tool_calls"),
]


def post(headers, body=b"", line=f"POST {COMPLETIONS} HTTP/1.1"):
    return f"{line}\r\nHost: x\r\n{headers}\r\n".encode() + body


PLAIN = json.dumps(BASE[COMPLETIONS]).encode()
LENGTH = f"Content-Length: {len(PLAIN)}\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"

FRAMING = [
    raw("no request at all", b"\x16\x03\x01\x02\x00\x01\x00" + b"\0" * 100, 400, 0),
    raw("HTTP/0.9", b"GET /health\r\n\r\n", 400, 0),
    raw("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 505, 0),
    raw("HTTP/3.0", post("", line="GET /livez HTTP/3.0"), 400, 505, 0),
    raw("no Host", f"POST {COMPLETIONS} HTTP/1.1\r\n{LENGTH}\r\n".encode() + PLAIN, 400),
    raw("two Hosts", post("Host: y\r\n" + LENGTH, PLAIN), 400),
    raw("a folded header", post("X-A: b\r\n c\r\n" + LENGTH, PLAIN), 400),
    raw("a blank before the colon", post(f"Content-Length : {len(PLAIN)}\r\n", PLAIN), 400),
    raw("a bare LF", post("X-A: b\n" + LENGTH, PLAIN), 400),
    raw("a NUL in a header", post("X-A: \0\r\n" + LENGTH, PLAIN), 400),
    raw("a header line without a colon", post("nonsense\r\n" + LENGTH, PLAIN), 400),
    raw("101 headers", post("".join(f"X-{i}: y\r\n" for i in range(101)) + LENGTH, PLAIN), 431),
    raw("a header of 100 kB", post(f"X-A: {TEXT}\r\n{LENGTH}", PLAIN), 431),
    raw("a path of 100 kB", post("", line=f"GET /{TEXT} HTTP/1.1"), 431),
    raw("two lengths", post(LENGTH + LENGTH, PLAIN), 400),
    raw("a list of lengths", post(f"Content-Length: {len(PLAIN)}, {len(PLAIN)}\r\n", PLAIN), 400),
    raw("a negative length", post("Content-Length: -1\r\n", PLAIN), 400),
    raw("a length with a sign", post(f"Content-Length: +{len(PLAIN)}\r\n", PLAIN), 400),
    raw("a length of 2^64 + 1", post("Content-Length: 18446744073709551617\r\n", PLAIN), 400, 413),
    raw("a length over the cap", post("Content-Length: 99999999999\r\n", PLAIN), 413),
    raw("length and chunks", post(LENGTH + CHUNKED, b"0\r\n\r\n"), 400),
    raw("two transfer encodings", post(CHUNKED + CHUNKED, b"0\r\n\r\n"), 400, 501),
    raw("gzip, chunked", post("Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"), 400, 501),
    raw("an unknown transfer encoding", post("Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"), 400, 501),
    raw("a chunk size that is not a number", post(CHUNKED, b"zz\r\nabc\r\n0\r\n\r\n"), 400),
    raw("a chunk size over 64 bits", post(CHUNKED, b"FFFFFFFFFFFFFFFFF\r\nabc\r\n"), 400, 413),
    raw("chunks over the cap", post(CHUNKED, b"7FFFFFFF\r\n" + b"x" * 1000), 413, 400),
    raw("a compressed body", post("Content-Encoding: gzip\r\n" + LENGTH, PLAIN), 415),
    raw("a body of another type", post("Content-Type: text/xml\r\n" + LENGTH, PLAIN), 400),
    raw("an unknown expectation", post("Expect: the-spanish-inquisition\r\nConnection: close\r\n" + LENGTH, PLAIN), 200, 400, 417),
    raw("another method", post("", line=f"DELETE {COMPLETIONS} HTTP/1.1"), 405),
    raw("a method of its own", post("", line="BREW /v1/models HTTP/1.1"), 400, 404, 405, 501),
    raw("a path that is none", post("", line="GET nowhere HTTP/1.1"), 400),
    raw("an absolute target", post("", line="GET http://elsewhere/v1/models HTTP/1.1"), 400),
    raw("bytes of no character in the path", b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400, 404),
    raw("a path up and out", post("", line="GET /v1/models/../../etc/passwd HTTP/1.1"), 404),
    raw("a model in the path", post("", line=f"GET /v1/models/{'%ff' * 1000} HTTP/1.1"), 404),
    raw("nothing after the head", post(LENGTH), 0, 400, 408),
    raw("half of the body", post(LENGTH, PLAIN[: len(PLAIN) // 2]), 0, 400, 408),
]

CASES = [*JSON_TEXT, *NUMBERS, *SIZES, *FRAMING]
