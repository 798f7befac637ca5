"""Chat prompts in Kimi's K2.6 grammar (standard library only).

The same text as models/tiny-k2/chat_template.jinja gives; check_template.py
compares the two. The TypeScript writer covers the schemas that this generator
uses, not the whole of JSON schema.
"""

import json

SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
CALL_ARGUMENT = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
IM_END = "<|im_end|>"
IM_MIDDLE = "<|im_middle|>"

_TS_NAMES = {"integer": "number"}


def deep_sorted(value):
    if isinstance(value, dict):
        return {key: deep_sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [deep_sorted(item) for item in value]
    return value


def _ts_type(schema):
    if "enum" in schema:
        return " | ".join('"%s"' % item for item in schema["enum"])
    kind = schema["type"]
    return _TS_NAMES.get(kind, kind)


def _ts_function(function):
    lines = []
    if function.get("description"):
        lines.append("// " + function["description"])
    schema = function["parameters"]
    required = schema.get("required", [])
    names = sorted(schema["properties"], key=lambda name: (name not in required, name))
    if not names:
        lines.append("type %s = (_: {}) => any;" % function["name"])
        return "\n".join(lines)
    fields = []
    for name in names:
        field = schema["properties"][name]
        text = "  // %s\n" % field["description"] if field.get("description") else ""
        mark = "" if name in required else "?"
        fields.append("%s  %s%s: %s" % (text, name, mark, _ts_type(field)))
    lines.append("type %s = (_: {\n%s\n}) => any;" % (function["name"], ",\n".join(fields)))
    return "\n".join(lines)


def tools_ts(tools):
    body = "\n".join(_ts_function(tool["function"]) for tool in tools)
    return "# Tools\n\n## functions\nnamespace functions {\n%s\n}\n" % body


def tools_json(tools):
    return json.dumps(deep_sorted(tools), ensure_ascii=False, separators=(",", ":"))


def tool_call_text(calls):
    """The model's own form of a list of calls."""
    out = SECTION_BEGIN
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        out += CALL_BEGIN + call["id"] + CALL_ARGUMENT + arguments + CALL_END
    return out + SECTION_END


def _head(role, name):
    opener = role if role in ("user", "assistant") else "system"
    return "<|im_%s|>%s%s" % (opener, name or role, IM_MIDDLE)


def _last_plain_assistant(messages):
    for at in range(len(messages) - 1, -1, -1):
        if messages[at]["role"] == "assistant" and not messages[at].get("tool_calls"):
            return at
    return -1


def assistant_body(message, reasoning):
    body = "<think>%s</think>%s" % (reasoning, message.get("content") or "")
    if message.get("tool_calls"):
        body += tool_call_text(message["tool_calls"])
    return body


def render(messages, tools=None, thinking=True, generation_prompt=True, as_json=False):
    """The prompt text for a conversation."""
    out = ""
    if tools:
        declared = tools_json(tools) if as_json else tools_ts(tools)
        out += _head("system", "tool_declare") + declared + IM_END
    split = _last_plain_assistant(messages)
    for at, message in enumerate(messages):
        role = message["role"]
        out += _head(role, message.get("name"))
        if role == "assistant":
            keep = at > split and thinking
            out += assistant_body(message, (message.get("reasoning_content") or "") if keep else "")
        elif role == "tool":
            out += "## Return of %s\n%s" % (message["tool_call_id"], message["content"])
        else:
            out += message["content"]
        out += IM_END
    if generation_prompt:
        out += _head("assistant", None) + ("<think>" if thinking else "<think></think>")
    return out
