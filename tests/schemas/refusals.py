#!/usr/bin/env python3
"""refusals.py PROGRAM FOLDER: docs/requests.md says which schemas are refused, with an example and its place. Fails where
schema_replies takes an example or names another place, and where the code refuses a keyword that the table does not have.
"""
import json
import pathlib
import re
import subprocess
import sys

TOP = pathlib.Path(__file__).parent.parent.parent
HEADING = "## Refused schemas\n"
# A wrong type of a keyword's value is a fault of the schema, not a limit of ours.
FAULTS = ("expected ", "a schema is ")
# Examples that are longer than the table has them.
LONG = {
    '{"properties": {… 65}, "maxProperties": 3}': {"properties": {f"p{i}": {} for i in range(65)}, "maxProperties": 3},
    '{"properties": {… 2001}}': {"properties": {f"p{i}": {} for i in range(2001)}},
    '{"properties": {… a name of 5,000 bytes}, "additionalProperties": {}}': {"properties": {"n" * 5000: {}}, "additionalProperties": {}},
}


def rows():
    """(place, schema) of each row of the table."""
    text = (TOP / "docs" / "requests.md").read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    return re.findall(r"^\| `(/\S*)` \| `(.*?)` \|", text, re.MULTILINE)


def refused_keywords():
    """Of all places in the code where a schema is refused beside a keyword that is spelt there."""
    found = set()
    for path in sorted((TOP / "src" / "grammar").glob("schema_*.cc")):
        for where, why in re.findall(r'refuse\(\s*place \+ "/(\w+)",\s*(?:fmt::format\(\s*)?"([^"]*)', path.read_text()):
            if not why.startswith(FAULTS):
                found.add(where)
    return found


def main(program, folder):
    table, faults = rows(), []
    schemas = "".join((json.dumps(LONG[schema]) if schema in LONG else schema) + "\n" for _, schema in table)
    lines = subprocess.run([program, folder, "1"], input=schemas.encode(), stdout=subprocess.PIPE, check=True).stdout
    said = {reply["schema"]: reply for reply in map(json.loads, filter(None, lines.decode().split("\n")))}
    for index, (place, schema) in enumerate(table):
        refusal = said[index].get("refused", "")
        if not refusal.startswith(place + ":"):
            faults.append(f"{schema} is not refused at {place}: {said[index]}")
    listed = {place.split("/")[-1] for place, _ in table}
    keywords = refused_keywords()
    faults += [f"{keyword} is refused somewhere, and the table has no row for it" for keyword in sorted(keywords - listed)]
    if len(table) < 20 or len(keywords) < 10:
        faults.append(f"{len(table)} rows and {len(keywords)} keywords: the table or the code is not read as it should be")
    print("\n".join(faults) or f"{len(table)} refused schemas, {len(keywords)} keywords")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
