#!/usr/bin/env python3
"""judge.py PROGRAM FOLDER [REPLIES]: random replies of many schemas under their masks, by the program schema_replies,
judged by jsonschema with its formats, and by pydantic where a schema is a model's. Fails where a reply is invalid or cut, a
schema is refused, or replies vary too little.
"""
import collections
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import jsonschema
import pydantic

import odd_schemas
import pydantic_models

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e"))
import json_schemas

HARD = [json.loads(line) for line in (HERE / "hard_schemas.jsonl").read_text(encoding="utf-8").splitlines()]
MODELS = pydantic_models.MODELS
SCHEMAS = odd_schemas.SCHEMAS + json_schemas.SCHEMAS + HARD + [model.model_json_schema() for model in MODELS]
FIRST_MODEL = len(SCHEMAS) - len(MODELS)
# How many of the replies of a schema differ, on average: 80 %. Masks that leave the shortest end only would make it 25 %.
LEAST_DISTINCT = 0.75

# jsonschema's own formats, and some of those for which it needs other packages.
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
LABELS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def check_format(name, raises=()):
    """Decorates what is true for a text of the format."""
    return lambda holds: FORMATS.checks(name, raises)(lambda value: not isinstance(value, str) or holds(value))


check_format("date-time", ValueError)(lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None and text[10] == "T")
check_format("time", ValueError)(lambda text: datetime.time.fromisoformat(text).tzinfo is not None)
check_format("hostname")(lambda text: len(text) < 254 and LABELS.fullmatch(text) is not None)
check_format("uri", ValueError)(lambda text: all(urllib.parse.urlsplit(text)[:2]) and text.isascii())
check_format("json-pointer")(lambda text: re.fullmatch(r"(/([^~/]|~[01])*)*", text) is not None)
check_format("duration", ValueError)(lambda text: pydantic.TypeAdapter(datetime.timedelta).validate_python(text) is not None)


def judge(program, folder, replies):
    lines = subprocess.run([program, folder, str(replies)], input="".join(json.dumps(schema) + "\n" for schema in SCHEMAS).encode(),
                           stdout=subprocess.PIPE, check=True).stdout
    texts, faults = collections.defaultdict(list), []
    for line in lines.decode().split("\n"):  # not splitlines(): texts may hold U+2028
        if not line:
            continue
        reply = json.loads(line)
        index, schema = reply["schema"], SCHEMAS[reply["schema"]]
        if "text" in reply:
            texts[index].append(reply["text"])
            try:
                jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(reply["text"]))
                if index >= FIRST_MODEL:
                    MODELS[index - FIRST_MODEL].model_validate_json(reply["text"])
            except (jsonschema.ValidationError, ValueError, RecursionError) as fault:
                faults.append(f"invalid: {json.dumps(schema)}: {reply['text'][:300]}: {str(fault)[:200]}")
        elif "cut" in reply:
            faults.append(f"cut: {json.dumps(schema)}: {reply['cut'][:300]}")
        else:
            faults.append(f"refused: {json.dumps(schema)[:300]}: {reply['refused']}")
    return texts, faults


if __name__ == "__main__":
    wanted = int(sys.argv[3]) if len(sys.argv) > 3 else 4 * (25 if "PERIGEE_SOAK" in os.environ else 1)
    got, wrong = judge(sys.argv[1], sys.argv[2], wanted)
    count = sum(len(each) for each in got.values())
    distinct = sum(len(set(each)) for each in got.values()) / max(1, count)
    if not wrong and count != wanted * len(SCHEMAS):
        wrong.append(f"expected {wanted} replies of each schema")
    if wanted == 4 and distinct < LEAST_DISTINCT:
        wrong.append(f"only {distinct:.0%} of the replies of a schema differ, expected {LEAST_DISTINCT:.0%}")
    print(f"{len(SCHEMAS)} schemas, {count} replies, {distinct:.0%} of them distinct, {len(wrong)} faults")
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)
