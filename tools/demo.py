#!/usr/bin/env python3
"""`make demo`: serves the bundled tiny Kimi on a free port, asks it held-out questions, checks the answers.

A word problem with thinking, a tool call and its follow-up, a retrieval from about 3,000 tokens back; streamed through
the OpenAI API. Exits non-zero when an answer is wrong or the whole takes over 60 s. Standard library only.
"""
import argparse
import json
import subprocess
import sys
import time

from server_process import TOP, ServerProcess

LIMIT_S = 60.0
GREY, BOLD, GREEN, RED, RESET = "\033[90m", "\033[1m", "\033[32m", "\033[31m", "\033[0m"
if not sys.stdout.isatty():
    GREY = BOLD = GREEN = RED = RESET = ""


class Reply:
    def __init__(self):
        self.content, self.reasoning, self.calls = "", "", {}
        self.tokens, self.first_s, self.seconds = 0, None, 0.0

    def message(self):
        """The assistant message to put back into the conversation."""
        message = {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}
        if self.calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for _, call in sorted(self.calls.items())
            ]
        return message


def ask(server, messages, tools=None, thinking=True):
    """Streams one chat completion to the terminal and returns it."""
    body = {
        "model": server.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 400,
        "chat_template_kwargs": {"thinking": thinking},
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = tools
    reply, begin, shown = Reply(), time.monotonic(), None
    for event in server.stream("/v1/chat/completions", body):
        if event.get("usage"):
            reply.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            shown = show(choice["delta"], reply, shown)
        if reply.first_s is None and (reply.content or reply.reasoning or reply.calls):
            reply.first_s = time.monotonic() - begin
    reply.seconds = time.monotonic() - begin
    print(RESET)
    rate = (reply.tokens - 1) / max(reply.seconds - (reply.first_s or 0), 1e-9)
    print(f"{GREY}  {reply.tokens} tokens, first after {(reply.first_s or 0) * 1000:.0f} ms, then {rate:.0f} tokens/s{RESET}")
    return reply


def show(delta, reply, shown):
    def emit(kind, text, colour):
        if shown != kind:
            sys.stdout.write(f"{RESET}\n  {GREY}{kind}:{RESET} {colour}")
        sys.stdout.write(text)
        sys.stdout.flush()
        return kind

    if delta.get("reasoning_content"):
        reply.reasoning += delta["reasoning_content"]
        shown = emit("thinking", delta["reasoning_content"], GREY)
    if delta.get("content"):
        reply.content += delta["content"]
        shown = emit("answer", delta["content"], BOLD)
    for piece in delta.get("tool_calls") or []:
        call = reply.calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
        function = piece.get("function", {})
        if piece.get("id"):
            call["id"], call["name"] = piece["id"], function.get("name", "")
            shown = emit("calls", f"{call['name']} ", BOLD)
        if function.get("arguments"):
            call["arguments"] += function["arguments"]
            shown = emit("calls", function["arguments"], BOLD)
    return shown


def clip(text, limit=160):
    return text if len(text) <= limit else text[:limit // 2] + f" … ({len(text)} characters) … " + text[-limit // 2:]


class Demo:
    def __init__(self, server, questions):
        self.server, self.questions, self.wrong = server, questions, 0

    def verdict(self, right, expected):
        self.wrong += not right
        print(f"  {GREEN}right{RESET}" if right else f"  {RED}WRONG{RESET}: expected {expected}")

    def word_problem(self):
        task = self.questions["word_problem"]
        print(f"\n{BOLD}A word problem, with thinking{RESET}\n  {task['messages'][0]['content']}", end="")
        reply = ask(self.server, task["messages"])
        self.verdict(reply.content.strip() == task["expected_text"] and bool(reply.reasoning), task["expected_text"])

    def tool(self):
        task = self.questions["tool"]
        print(f"\n{BOLD}A tool call and its follow-up{RESET}\n  {task['messages'][0]['content']}", end="")
        reply = ask(self.server, task["messages"], task["tools"])
        call = reply.calls.get(0, {"name": "", "arguments": "null"})
        wanted = task["expected_call"]
        right = call["name"] == wanted["name"] and parsed(call["arguments"]) == wanted["arguments"]
        self.verdict(right, json.dumps(wanted))
        if not right:
            return
        print(f"  {GREY}the tool returns:{RESET} {task['tool_result']}", end="")
        result = {"role": "tool", "tool_call_id": call["id"], "content": task["tool_result"]}
        reply = ask(self.server, task["messages"] + [reply.message(), result], task["tools"])
        self.verdict(reply.content.strip() == task["expected_final"], task["expected_final"])

    def retrieval(self):
        task = self.questions["retrieval"]
        print(f"\n{BOLD}A value from far back{RESET}\n  {clip(task['messages'][0]['content'])}", end="")
        reply = ask(self.server, task["messages"])
        self.verdict(task["expected"] in reply.content, task["expected_text"])


def parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", default=f"{TOP}/models/tiny-k2")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begin = time.monotonic()
    drawn = subprocess.run(
        [sys.executable, f"{TOP}/tools/train_tiny/questions.py", "--seed", str(arguments.seed), "--json"],
        capture_output=True, check=True)
    print(f"Serving {arguments.model} on the CPU, asking the questions of seed {arguments.seed}.")
    with ServerProcess(arguments.program, arguments.model, ["--device", "cpu"]) as server:
        print(f"Ready after {time.monotonic() - begin:.1f} s at {server.url}")
        demo = Demo(server, json.loads(drawn.stdout))
        demo.word_problem()
        demo.tool()
        demo.retrieval()
    seconds = time.monotonic() - begin
    late = seconds > LIMIT_S
    print(f"\n{demo.wrong} wrong, {seconds:.1f} s in all" + (f": over the limit of {LIMIT_S:.0f} s" if late else ""))
    return 1 if demo.wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
