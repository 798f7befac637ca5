#!/usr/bin/env python3
"""judge.py PROGRAM FOLDER [REPLIES]: random replies of odd_schemas.py and of the end-to-end tests' schemas under their
masks, by the program schema_replies, judged by jsonschema. Fails where a reply is invalid or cut, or a schema is refused.
"""
import collections
import json
import os
import subprocess
import sys

import jsonschema

import odd_schemas

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "e2e"))
import json_schemas

SCHEMAS = odd_schemas.SCHEMAS + json_schemas.SCHEMAS


def judge(program, folder, replies):
    lines = subprocess.run([program, folder, str(replies)], input="".join(json.dumps(schema) + "\n" for schema in SCHEMAS).encode(),
                           stdout=subprocess.PIPE, check=True).stdout
    count, faults = collections.Counter(), []
    for line in lines.decode().split("\n"):  # not splitlines(): texts may hold U+2028
        if not line:
            continue
        reply = json.loads(line)
        schema = SCHEMAS[reply["schema"]]
        if "text" in reply:
            count["valid"] += 1
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(reply["text"]))
            except (jsonschema.ValidationError, ValueError, RecursionError) as fault:
                faults.append(f"invalid: {json.dumps(schema)}: {reply['text'][:300]}: {str(fault)[:200]}")
        elif "cut" in reply:
            faults.append(f"cut: {json.dumps(schema)}: {reply['cut'][:300]}")
        else:
            faults.append(f"refused: {json.dumps(schema)[:300]}: {reply['refused']}")
    return count, faults


if __name__ == "__main__":
    counts, wrong = judge(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4 * (25 if "PERIGEE_SOAK" in os.environ else 1))
    print(f"{len(SCHEMAS)} schemas, {counts['valid']} replies, {len(wrong)} faults")
    print("\n".join(wrong))
    sys.exit(1 if wrong or not counts["valid"] else 0)
