"""Compares render.py with the model's chat_template.jinja (needs jinja2)."""

import json
import os
import random

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

import render
import tool_tasks

HERE = os.path.dirname(os.path.abspath(__file__))


def load_template():
    """The environment that transformers renders templates in."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    with open(os.path.join(HERE, "../../models/tiny-k2/chat_template.jinja")) as text:
        return env.from_string(text.read())


def conversations():
    rng = random.Random(5)
    case = tool_tasks.draw(rng, False)
    user = {"role": "user", "content": case["question"]}
    call = {"role": "assistant", "content": "", "reasoning_content": "call tool", "tool_calls": [case["call"]]}
    back = {"role": "tool", "tool_call_id": case["call"]["id"], "content": case["result"]}
    done = {"role": "assistant", "content": case["final"], "reasoning_content": "done"}
    system = {"role": "system", "content": "Be brief."}
    named = {"role": "user", "name": "Bob", "content": "a"}
    yield [user], case["tools"]
    yield [system, user, call, back], case["tools"]
    yield [system, user, call, back, done, user, call, back], case["tools"]
    yield [named, done, user], None
    yield [dict(back, name="f")], None


def main():
    template, count = load_template(), 0
    for messages, tools in conversations():
        for thinking in (True, False):
            for as_json in (True, False):
                mine = render.render(messages, tools, thinking, True, as_json)
                options = {"messages": messages, "tools": render.deep_sorted(tools), "add_generation_prompt": True}
                if tools and not as_json:
                    options["tools_ts_str"] = render.tools_ts(tools)
                assert template.render(thinking=thinking, **options) == mine, mine
                count += 1
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(messages=parts) == "<|im_user|>user<|im_middle|>ab<|im_end|>"
    kept = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "reasoning_content": "r"}]
    assert "<think>r</think>x" in template.render(messages=kept, preserve_thinking=True)
    assert "<think></think>x" in template.render(messages=kept)
    print("ok: %d renderings agree" % count)


if __name__ == "__main__":
    main()
