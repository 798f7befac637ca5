"""Draws held-out questions for a demonstration (Python standard library only).

    python3 questions.py --seed 1 --json

prints one word problem, one tool question and one retrieval question, none of
which was in the training data, with the expected answers.
"""

import argparse
import json
import random

import problems
import retrieval
import tool_tasks

RETRIEVAL_TOKENS = 3000


def word_problem(rng):
    problem = problems.draw(rng, rng.choice(problems.TRAIN_IDS), True)
    return {"messages": [{"role": "user", "content": problem["question"]}],
            "expected": problem["answer"], "expected_text": "The answer is %s." % problem["answer"],
            "steps": problem["steps"], "template": problem["template"]}


def tool_question(rng):
    case = tool_tasks.draw(rng, True)
    return {"messages": [{"role": "user", "content": case["question"]}], "tools": case["tools"],
            "expected_call": {"name": case["name"], "arguments": case["arguments"]},
            "tool_result": case["result"], "expected_final": case["final"]}


def retrieval_question(rng, tokens):
    case = retrieval.draw_eval(rng, tokens)
    content = retrieval.chat_question(case["text"], case["key"])
    return {"messages": [{"role": "user", "content": content}], "expected": case["value"],
            "expected_text": retrieval.record(case["key"], case["value"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=RETRIEVAL_TOKENS, help="length of the retrieval text, up to 16,000")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of readable text")
    args = parser.parse_args()
    rng = random.Random("questions-%d" % args.seed)
    drawn = {"word_problem": word_problem(rng), "tool": tool_question(rng),
             "retrieval": retrieval_question(rng, args.tokens)}
    if args.json:
        print(json.dumps(drawn, indent=1))
        return
    for name, question in drawn.items():
        text = question["messages"][0]["content"]
        shown = text if len(text) < 400 else text[:120] + " ... " + text[-60:]
        expected = question.get("expected") or json.dumps(question["expected_call"])
        print("%s: %s\n  expected: %s" % (name, shown, expected))


if __name__ == "__main__":
    main()
