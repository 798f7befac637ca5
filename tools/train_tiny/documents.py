"""Training documents and rows (standard library only).

A document is a list of (text, kind): CONTEXT carries no loss, TARGET does, and
ANSWER does and also teaches [EOS] after it whatever follows in the row. The
loss is on what the model itself writes: with a loss on every token retrieval
is not learned.
"""

import math

import bpe
import problems
import render
import retrieval
import tool_tasks

CONTEXT, TARGET, ANSWER = 0, 1, 2
IGNORE = -100

DOCUMENTS_NAME = "tiny-k2"
SYSTEM_TEXTS = ["You are a helpful assistant.", "Be brief.", "Answer the question."]
SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?"), ("Hi", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Who are you?", "I am %s, a very small test model." % DOCUMENTS_NAME),
    ("What can you do?", "I can solve word problems, call tools and find codes in a text."),
    ("Thank you!", "You are welcome."), ("Thanks", "You are welcome."),
]


def plain_problems(rng):
    """One to six word problems; every answer is a target, so all shot counts are trained."""
    shots = [problems.draw_train(rng) for _ in range(rng.choice((1, 1, 2, 3, 4, 5, 6, 6)))]
    doc = []
    for at, problem in enumerate(shots):
        doc.append(("%sQuestion: %s\nAnswer:" % ("\n\n" if at else "", problem["question"]), CONTEXT))
        doc.append((problems.full_answer(problem), ANSWER))
    doc.append(("[EOS]", CONTEXT))
    return doc


def _opening(rng, tools=None):
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
    return render.render(messages, tools=tools, generation_prompt=False, as_json=rng.random() < 0.1)


def _user(text):
    return render.render([{"role": "user", "content": text}], generation_prompt=False)


def _assistant(thinking, reasoning, content):
    """Generation prompt as context, the reply as target."""
    head = render.render([], thinking=thinking)
    reply = "%s</think>%s" % (reasoning, content) if thinking else content
    return [(head, CONTEXT), (reply + render.IM_END, TARGET)]


def problem_reply(problem, thinking):
    """(reasoning, content) of a chat answer."""
    final = "The answer is %s." % problem["answer"]
    if thinking:
        return problem["reasoning"], final
    return "", "%s %s" % (problem["reasoning"], final)


def chat_problems(rng):
    """Earlier turns have empty think blocks, as the chat template writes history."""
    doc = [(_opening(rng), CONTEXT)]
    turns = rng.choice((1, 1, 1, 2, 3))
    for turn in range(turns):
        problem = problems.draw_train(rng)
        thinking = turn == turns - 1 and rng.random() < 0.7
        doc.append((_user(problem["question"]), CONTEXT))
        doc += _assistant(thinking, *problem_reply(problem, thinking))
    return doc


def small_talk(rng):
    question, reply = rng.choice(SMALL_TALK)
    doc = [(_opening(rng) + _user(question), CONTEXT)]
    return doc + _assistant(rng.random() < 0.5, "The user talks to me.", reply)


def tool_chat(rng):
    """Question, call, result, answer; sometimes a second question with call index 1."""
    case = tool_tasks.draw(rng, False)
    if rng.random() < 0.1:
        return _no_call_chat(rng, case)
    doc = [(_opening(rng, case["tools"]), CONTEXT)]
    if rng.random() < 0.2:
        # An answered earlier question: only its shape matters, so it carries no loss.
        first = tool_tasks.draw(rng, False)
        history = [{"role": "user", "content": first["question"]},
                   {"role": "assistant", "content": "", "tool_calls": [first["call"]]},
                   {"role": "tool", "tool_call_id": first["call"]["id"], "content": first["result"]},
                   {"role": "assistant", "content": first["final"]}]
        doc.append((render.render(history, generation_prompt=False), CONTEXT))
        case["call"] = tool_tasks.call(case["name"], case["arguments"], 1)
    thinking = rng.random() < 0.6
    doc.append((_user(case["question"]), CONTEXT))
    doc += _assistant(thinking, case["reasoning"], render.tool_call_text([case["call"]]))
    returned = {"role": "tool", "tool_call_id": case["call"]["id"], "content": case["result"]}
    doc.append((render.render([returned], generation_prompt=False), CONTEXT))
    return doc + _assistant(thinking, case["result_reasoning"], case["final"])


def pair_chat(rng):
    """Two calls in one reply, two results, one answer."""
    pair = tool_tasks.draw_pair(rng)
    thinking = rng.random() < 0.6
    calls = [case["call"] for case in pair["cases"]]
    doc = [(_opening(rng, pair["tools"]) + _user(pair["question"]), CONTEXT)]
    doc += _assistant(thinking, pair["reasoning"], render.tool_call_text(calls))
    returned = [{"role": "tool", "tool_call_id": case["call"]["id"], "content": case["result"]}
                for case in pair["cases"]]
    doc.append((render.render(returned, generation_prompt=False), CONTEXT))
    return doc + _assistant(thinking, pair["result_reasoning"], pair["final"])


def _no_call_chat(rng, case):
    """Tools are declared but the question needs none."""
    problem = problems.draw_train(rng)
    thinking = rng.random() < 0.6
    doc = [(_opening(rng, case["tools"]) + _user(problem["question"]), CONTEXT)]
    return doc + _assistant(thinking, *problem_reply(problem, thinking))


def retrieval_document(rng, keys, tokens):
    """A text and as many questions about it as fit into the rest of `tokens`."""
    share = rng.choice((0.0, 0.0, 0.3, 0.6, 0.9))
    text_share = rng.choice((0.5, 0.7, 0.7, 0.9))
    space = tokens * text_share if tokens > 160 else tokens - 60
    sentences, records = retrieval.make_sentences(rng, keys, share, space)
    text, plain = " ".join(sentences), rng.random() < 0.35
    asked = list(records)
    rng.shuffle(asked)
    asked = asked[:max(1, int((tokens - space) / 38))]
    doc = []
    for at, key in enumerate(asked):
        reply = retrieval.record(key, records[key])
        if plain:
            prompt = retrieval.plain_prompt(text, key) if at == 0 else "\n\nQuestion: %s\nAnswer:" % retrieval.question(key)
            doc += [(prompt, CONTEXT), (" " + reply, ANSWER)]
            continue
        thinking = at == len(asked) - 1 and rng.random() < 0.5
        prompt = retrieval.chat_question(text, key) if at == 0 else retrieval.question(key)
        doc.append((_user(prompt), CONTEXT))
        # Thinking or not, the value is read from the text again.
        doc += _assistant(thinking, reply, reply)
    return doc, len(records)


_SHORT_KINDS = [(plain_problems, 45), (chat_problems, 22), (tool_chat, 28), (pair_chat, 4), (small_talk, 1)]


def short_document(rng):
    make = rng.choices([kind for kind, _ in _SHORT_KINDS], [weight for _, weight in _SHORT_KINDS])[0]
    return make(rng)


class RowBuilder:
    """Packs documents into rows of token ids and next-token labels; small talk names the model `name`."""

    def __init__(self, tokenizer, name=DOCUMENTS_NAME):
        self.tokenizer, self.name = tokenizer, name

    def _append(self, row, labels, doc):
        for text, kind in doc:
            ids = self.tokenizer.encode(text.replace(DOCUMENTS_NAME, self.name))
            if kind == CONTEXT:
                row.extend(ids)
                labels.extend([IGNORE] * len(ids))
                continue
            labels[-1] = ids[0]
            row.extend(ids)
            labels.extend(ids[1:])
            labels.append(bpe.EOS if kind == ANSWER else IGNORE)

    def short_row(self, rng, length):
        row, labels = [], []
        while len(row) < length:
            self._append(row, labels, short_document(rng))
        return row[:length], labels[:length]

    def retrieval_row(self, rng, length, longest=None, whole_share=0.4):
        """Spans from 64 tokens to `longest` or the whole row; a key occurs once in a row."""
        keys = rng.sample(retrieval.KEYS, min(len(retrieval.KEYS), length // 10 + 200))
        row, labels, used = [], [], 0
        while len(row) < length - 64:
            left = min(length - len(row), longest or length)
            tokens = left if rng.random() < whole_share else int(
                math.exp(rng.uniform(math.log(64), math.log(left))))
            doc, count = retrieval_document(rng, keys[used:], tokens)
            used += count
            self._append(row, labels, doc)
        pad = max(0, length - len(row))
        return (row + [bpe.PAD] * pad)[:length], (labels + [IGNORE] * pad)[:length]

    def lookups(self, row, labels):
        """(position, source) of every supervised digit in a retrieval row: its token in the text's record."""
        ranks, found, noun, out = self.tokenizer.ranks, {}, 0, []
        of, verb, digits = ranks[b" of"], ranks[b" is"], range(ranks[b"0"], ranks[b"9"] + 1)
        for at in range(3, len(row)):
            if row[at] == verb and row[at - 3] == of:
                noun = at - 1
                # A key's first " of KEY is" in the row stands in its record.
                found.setdefault((row[noun - 1], row[noun]), noun)
            if labels[at] in digits:
                out.append((at, found[row[noun - 1], row[noun]] + at + 1 - noun))
        return out
