#!/usr/bin/env python3
"""How long the objects of a build took to compile: tools/compile_time.py BUILD SUFFIX [--most SECONDS].

From the log of ninja, which has when each object began and ended: the sum over objects whose name ends in SUFFIX, about
what one core takes for them. What a compiler cache gave back counts with the little that this took. Over --most is a
failure."""
import argparse
import sys


def durations(log, suffix):
    """-> {object: seconds of its newest build}."""
    found = {}
    for line in log.splitlines():
        fields = line.split("\t")
        if not line.startswith("#") and len(fields) >= 4 and fields[3].endswith(suffix):
            found[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("suffix")
    parser.add_argument("--most", type=float, default=float("inf"))
    arguments = parser.parse_args()
    with open(f"{arguments.build}/.ninja_log", encoding="utf-8") as file:
        found = durations(file.read(), arguments.suffix)
    total = sum(found.values())
    for name, seconds in sorted(found.items(), key=lambda item: -item[1])[:5]:
        print(f"{seconds:7.1f} s  {name}")
    print(f"{total:7.1f} s  {len(found)} objects ending in {arguments.suffix}")
    if not found or total > arguments.most:
        print(f"there must be some, and they may take {arguments.most:g} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
