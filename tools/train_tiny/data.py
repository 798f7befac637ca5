"""Data generator of both models: samples, proof of the split, evaluation sets.

    python3 data.py --sample 3          print training documents
    python3 data.py --check             prove that training and evaluation share no pair; sources of retrieved digits
    python3 data.py --make-eval DIR     write the evaluation sets (same bytes every time)
    python3 data.py --make-eval DIR --full-text   also write the long retrieval prompts
    python3 data.py --make-lm-eval DIR  write the documents of the lm_eval task
    python3 data.py --vocabulary FILE   train the BPE vocabulary

Standard library only.
"""

import argparse
import collections
import gzip
import json
import os
import random

import bpe
import documents
import problems
import render
import retrieval
import tool_tasks

EVAL_SEED = 20240
VOCABULARY_SEED = 7
RETRIEVAL_LENGTHS = {1024: 100, 4096: 200, 16384: 100}
SHORTEST_STORED = 1024


def word_problem_records(shots, held_out, count, seed):
    """Evaluation problems as prompts with `shots` worked training problems before them."""
    rng = random.Random(seed)
    ids = problems.HELD_OUT_IDS if held_out else problems.TRAIN_IDS
    seen, out = set(), []
    while len(out) < count:
        problem = problems.draw(rng, ids[len(out) % len(ids)], True)
        if problem["key"] in seen:
            # Small templates run out of new numbers; another question text will do.
            problem = problems.draw(rng, ids[len(out) % len(ids)], True)
        seen.add(problem["key"])
        examples = [problems.draw_train(rng) for _ in range(shots)]
        out.append({"kind": "gsm_%dshot%s" % (shots, "_held_out" if held_out else ""),
                    "prompt": problems.few_shot_prompt(examples, problem),
                    "answer": problem["answer"], "steps": problem["steps"],
                    "template": problem["template"], "key": problem["key"]})
    return out


def chat_problem_records(count, seed):
    rng = random.Random(seed)
    out = []
    for at in range(count):
        problem = problems.draw(rng, problems.TRAIN_IDS[at % len(problems.TRAIN_IDS)], True)
        out.append({"kind": "gsm_chat", "messages": [{"role": "user", "content": problem["question"]}],
                    "thinking": at % 2 == 0, "answer": problem["answer"], "steps": problem["steps"],
                    "template": problem["template"], "key": problem["key"]})
    return out


def tool_records(count, seed):
    rng = random.Random(seed)
    out = []
    for at in range(count):
        case = tool_tasks.draw(rng, True)
        out.append({"kind": "tool_call", "messages": [{"role": "user", "content": case["question"]}],
                    "tools": case["tools"], "thinking": at % 2 == 0, "name": case["name"],
                    "arguments": case["arguments"], "result": case["result"],
                    "answer": case["final"], "steps": 1, "template": case["name"], "key": case["key"]})
    return out


def retrieval_record(tokens, at, full_text):
    """Retrieval question number `at`; the long ones are stored as their seed."""
    seed = EVAL_SEED * 1000 + tokens + at * 100003
    rng = random.Random(seed)
    # Room for the question, the chat markers, the answer and the estimate's error.
    case = retrieval.draw_eval(rng, tokens - 60 - tokens // 160)
    form = "chat" if at % 2 == 0 else "plain"
    out = {"kind": "retrieval_%d" % tokens, "form": form, "tokens": tokens, "index": at,
           "answer": case["value"], "question": retrieval.question(case["key"]),
           "steps": 1, "template": "code"}
    if form == "chat":
        out["thinking"] = at % 4 == 0
    if full_text and form == "chat":
        content = retrieval.chat_question(case["text"], case["key"])
        out["messages"] = [{"role": "user", "content": content}]
    elif full_text:
        out["prompt"] = retrieval.plain_prompt(case["text"], case["key"])
    return out


COMPRESSED = {"gsm_5shot_b", "gsm_5shot_held_out", "tools", "retrieval_1024"}  # large sets that tools/score.py alone reads


def eval_sets(full_text):
    """File name → records."""
    five = word_problem_records(5, False, 1012, EVAL_SEED + 1)
    sets = {
        "gsm_0shot": word_problem_records(0, False, 1012, EVAL_SEED),
        # Two halves, so that no file grows large.
        "gsm_5shot_a": five[0::2], "gsm_5shot_b": five[1::2],
        "gsm_0shot_held_out": word_problem_records(0, True, 400, EVAL_SEED + 2),
        "gsm_5shot_held_out": word_problem_records(5, True, 200, EVAL_SEED + 3),
        "gsm_chat": chat_problem_records(400, EVAL_SEED + 4),
        "tools": tool_records(400, EVAL_SEED + 5),
    }
    for tokens, count in RETRIEVAL_LENGTHS.items():
        full = full_text or tokens <= SHORTEST_STORED
        sets["retrieval_%d" % tokens] = [retrieval_record(tokens, at, full) for at in range(count)]
    return sets


def write_sets(folder, sets):
    os.makedirs(folder, exist_ok=True)
    for name, records in sets.items():
        text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records).encode()
        if name in COMPRESSED:
            name, text = name + ".jsonl.gz", gzip.compress(text, 9, mtime=0)
        else:
            name += ".jsonl"
        with open(os.path.join(folder, name), "wb") as out:
            out.write(text)


def lm_eval_documents(count, template_ids, evaluation, seed):
    """Question and worked answer, as the lm_eval task reads them."""
    rng = random.Random(seed)
    out = []
    for at in range(count):
        problem = problems.draw(rng, template_ids[at % len(template_ids)], evaluation)
        out.append({"question": problem["question"], "answer": problems.full_answer(problem).strip(),
                    "steps": problem["steps"], "template": problem["template"]})
    return out


def lm_eval_sets():
    ids = problems.TRAIN_IDS
    return {"test": lm_eval_documents(1012, ids, True, EVAL_SEED + 6),
            "fewshot": lm_eval_documents(44, ids, False, EVAL_SEED + 7)}


def check_lookups(rows):
    """Every retrieved digit of training rows has its source in the text."""
    here = os.path.dirname(os.path.abspath(__file__))
    builder = documents.RowBuilder(bpe.Tokenizer(os.path.join(here, "../../models/tiny-k2/tiktoken.model")))
    digits, found = {builder.tokenizer.ranks[b"%d" % digit] for digit in range(10)}, 0
    for seed in range(rows):
        row, labels = builder.retrieval_row(random.Random(seed), 1024)
        lookups = builder.lookups(row, labels)
        assert [at for at, _ in lookups] == [at for at, label in enumerate(labels) if label in digits]
        assert all(source < at and row[source] == labels[at] for at, source in lookups)
        found += len(lookups)
    print("    %d retrieved digits of training rows, each with its source" % found)


def check(samples):
    """Proves the split: by the rule and on a large draw."""
    sets = eval_sets(False)
    gsm = [r for name, records in sets.items() if name.startswith("gsm") for r in records]
    tools = sets["tools"]
    eval_keys = {r["key"] for r in gsm}
    assert all(problems.is_eval_key(key) for key in eval_keys)
    rng = random.Random(1)
    train_keys = {problems.draw_train(rng)["key"] for _ in range(samples)}
    assert not any(problems.is_eval_key(key) for key in train_keys)
    assert not train_keys & eval_keys
    assert not {key.split("|")[0] for key in train_keys} & set(problems.HELD_OUT_IDS)
    train_calls = {tool_tasks.draw(rng, False)["key"] for _ in range(samples)}
    assert not train_calls & {r["key"] for r in tools}
    held_out = sum(1 for r in gsm if r["template"] in problems.HELD_OUT_IDS)
    print("ok: %d evaluation problems (%d pairs, %d of held-out templates), %d tool questions"
          % (len(gsm), len(eval_keys), held_out, len(tools)))
    print("    none among %d training pairs and %d training calls drawn"
          % (len(train_keys), len(train_calls)))
    check_lookups(50)


def vocabulary(path):
    rng = random.Random(VOCABULARY_SEED)
    names = bpe.special_ids()
    counts = collections.Counter()
    texts = []
    for _ in range(6000):
        texts += [text for text, _ in documents.short_document(rng)]
    for _ in range(60):
        keys = rng.sample(retrieval.KEYS, 600)
        texts += [text for text, _ in documents.retrieval_document(rng, keys, 3000)[0]]
    splitter = bpe.special_splitter(names)
    for text in texts:
        for chunk in splitter.split(text):
            if chunk not in names:
                counts.update(bpe.pieces(chunk))
    bpe.boost(counts, 400)
    bpe.save(bpe.train(counts), path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--check-samples", type=int, default=100000)
    parser.add_argument("--make-eval", metavar="DIR")
    parser.add_argument("--full-text", action="store_true")
    parser.add_argument("--make-lm-eval", metavar="DIR")
    parser.add_argument("--vocabulary", metavar="FILE")
    args = parser.parse_args()
    rng = random.Random(0)
    for _ in range(args.sample):
        print("".join(text for text, _ in documents.short_document(rng)), end="\n----\n")
    if args.check:
        check(args.check_samples)
    if args.make_eval:
        write_sets(args.make_eval, eval_sets(args.full_text))
    if args.make_lm_eval:
        write_sets(args.make_lm_eval, lm_eval_sets())
    if args.vocabulary:
        vocabulary(args.vocabulary)


if __name__ == "__main__":
    main()
