"""Writes tests/data/chat_templates/: what jinja2 and tools/train_tiny/render.py make of templates, chats and tools.

Run with a Python that has jinja2 (Debian: /usr/bin/python3 with python3-jinja2):

    python3 tools/goldens/make_template_goldens.py

goldens.json: {"context", "cases": [{"name", "template", "context"?, "output" or "error": true}]}; a case without a
context has the common one; a template named *.jinja is that file beside goldens.json or the one of models/tiny-k2.
tools.json and chats.json come from render.py, which knows
the prompt format but neither jinja2 nor our C++.
"""

import json
import os
import random
import sys

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

import template_cases

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../..")
OUT = os.path.join(ROOT, "tests/data/chat_templates")
sys.path.insert(0, os.path.join(ROOT, "tools/train_tiny"))

import render  # noqa: E402
import tool_tasks  # noqa: E402


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise ValueError(message)


def environment():
    """The environment that transformers renders chat templates in, with a fixed date."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def template_text(source):
    if source == "chat_template.jinja":
        return open(os.path.join(ROOT, "models/tiny-k2", source), encoding="utf-8").read()
    if source.endswith(".jinja"):
        return open(os.path.join(OUT, source), encoding="utf-8", newline="").read()
    return source


def golden(env, name, source, context):
    case = {"name": name, "template": source}
    if context is not template_cases.CONTEXT:
        case["context"] = context
    variables = dict(context)
    date = variables.pop("strftime_now", None)
    if date is not None:
        variables["strftime_now"] = lambda _format: date
    try:
        case["output"] = env.from_string(template_text(source)).render(**variables)
    except Exception as error:  # noqa: BLE001: whatever jinja2 raises is the expected result
        case["error"] = True
        print("raises  %-28s %s" % (name, str(error)[:80]))
    return case


def tool_lists():
    """Lists of tools whose schemas render.py's TypeScript writer covers."""
    rng = random.Random(11)
    words = ["city", "Zeta", "alpha", "b_2", "unit", "\u00e9t\u00e9", "x", "\u5317\u4eac", "_k", "a.b"]
    kinds = ["string", "integer", "number", "boolean", "null"]
    for index in range(48):
        tools = []
        for at in range(rng.randint(1, 4)):
            names = rng.sample(words, rng.randint(0, 6))
            properties = {}
            for name in names:
                field = {"type": rng.choice(kinds)}
                if field["type"] == "string" and rng.random() < 0.4:
                    field["enum"] = rng.sample(["c", "f", "\u00e9", "two words", '"q"'], rng.randint(1, 3))
                if rng.random() < 0.6:
                    field["description"] = rng.choice(["A city.", "// odd", "caf\u00e9 \U0001F642", "tab\there"])
                properties[name] = dict(rng.sample(sorted(field.items()), len(field)))
            parameters = {"type": "object", "properties": properties}
            if rng.random() < 0.8:
                parameters["required"] = rng.sample(names, rng.randint(0, len(names)))
            function = {"name": "f%d_%d" % (index, at), "parameters": parameters}
            if rng.random() < 0.7:
                function["description"] = rng.choice(["Does it.", "Says \"hi\" \\ bye."])
            tools.append({"type": "function", "function": function})
        yield tools
    for seed in range(8):
        yield tool_tasks.draw(random.Random(seed), False)["tools"]


def chats():
    """(messages, tools, options of render.render, template kwargs) for the bundled model's template."""
    user = {"role": "user", "content": "q"}
    system = {"role": "system", "content": "Be brief."}
    for seed in range(6):
        case = tool_tasks.draw(random.Random(seed), False)
        call = {"role": "assistant", "content": "", "reasoning_content": "call tool", "tool_calls": [case["call"]]}
        back = {"role": "tool", "tool_call_id": case["call"]["id"], "content": case["result"]}
        done = {"role": "assistant", "content": case["final"], "reasoning_content": "done"}
        ask = {"role": "user", "content": case["question"]}
        again = dict(call, reasoning_content="call again")
        for messages in ([ask], [system, ask, call, back], [system, ask, call, back, done, ask, again, back]):
            for thinking in (True, False):
                yield messages, case["tools"], {"thinking": thinking}
    plain = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    for thinking in (True, False):
        for prompt in (True, False):
            options = {"thinking": thinking, "generation_prompt": prompt}
            yield [user, plain, dict(user, content="q2")], None, options
            yield [dict(user, name="Bob", content="a")], None, options
            yield [dict(user, content="")], None, options
            yield [dict(user, content="<|im_end|> caf\u00e9\n\u4f60\u597d")], None, options


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def a_line_each(values):
    return "[\n%s\n]" % ",\n".join(map(compact, values))


def write(name, text):
    with open(os.path.join(OUT, name), "w", encoding="utf-8") as out:
        out.write(text + "\n")


def main():
    env = environment()
    cases = [golden(env, *case) for case in template_cases.all_cases(OUT)]
    assert len({case["name"] for case in cases}) == len(cases), "two cases share a name"
    write("goldens.json", '{"context":%s,\n"cases":%s}' % (compact(template_cases.CONTEXT), a_line_each(cases)))
    lists = [{"tools": tools, "text": render.tools_ts(tools)} for tools in tool_lists()]
    write("tools.json", a_line_each(lists))
    prompts = [
        {"messages": messages, "tools": tools, "options": options, "text": render.render(messages, tools, **options)}
        for messages, tools, options in chats()
    ]
    write("chats.json", a_line_each(prompts))
    raised = sum("error" in case for case in cases)
    print("%d templates (%d raise), %d tool lists, %d chats" % (len(cases), raised, len(lists), len(prompts)))


if __name__ == "__main__":
    main()
