#!/usr/bin/env python3
"""What one request does to everybody else: the gaps of another client's stream and the latency of /livez meanwhile.

    bench/edge_gaps.py [--program build/perigee] [--bench build/bench/edge_bench] [--model models/tiny-k2] [--repeat 3]

Starts a server on the CPU and three processes: one reads a stream without end, one asks /livez every 5 ms, and this one
sends the requests of src/server/hostile_requests.h (edge_bench prints their bodies), some that are allowed, and forms of
replies that cost much to compile, one at a time. A gap counts to a request when any part of it lies between the request's first byte and the end of its reply.
Run it on a quiet machine: the clients take processor time, too.
"""
import argparse
import http.client
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "tools"))

from server_process import ServerProcess  # noqa: E402

PROBE_PERIOD_S = 0.005
QUIET_S = 5  # the row without a request
PAUSE_S = 0.1  # between requests
COMPLETIONS = "/v1/completions"


def read_stream(port, stop, pipe):
    """The times at which events of a stream arrived; None where one stream ended and the next began."""
    times = []
    body = json.dumps({"prompt": [65, 400, 401], "max_tokens": 16000, "ignore_eos": True, "stream": True})
    while not stop.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        for line in reply:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
            if stop.is_set():
                break
        times.append(None)
        connection.close()
    pipe.send(times)


def ask_livez(port, stop, pipe):
    """(begin, end) of each probe."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    probes = []
    while not stop.is_set():
        begin = time.monotonic()
        connection.request("GET", "/livez")
        reply = connection.getresponse()
        reply.read()
        probes.append((begin, time.monotonic()))
        if reply.status != 200:
            raise SystemExit(f"/livez answered {reply.status}")
        time.sleep(max(0.0, begin + PROBE_PERIOD_S - time.monotonic()))
    pipe.send(probes)


def schema_of(schema):
    return {"json": schema}


# As large as they may be, or slow for their size; each is made anew by a number, so that none is known from before.
FORMS = {
    "15,000 enum values": lambda n: schema_of({"enum": [f"{n}.{i:x}" for i in range(15_000)]}),
    "2,000 definitions in a ring": lambda n: schema_of({"$ref": "#/$defs/0", "$defs": {str(i): {"type": "object", "properties": {
        f"p{n}": {"$ref": f"#/$defs/{(i * 7 + 1) % 2000}"}}} for i in range(2000)}}),
    "anyOf in allOf, doubling": lambda n: schema_of({"$ref": "#/$defs/0", "$defs": {"25": {"type": "integer"}, **{str(i): {"anyOf": [
        {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, {"minimum": i - n}]}, {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, {"maximum": -i}]}]}
        for i in range(25)}}}),
    "a pattern of 2^18 states": lambda n: schema_of({"type": "string", "maxLength": 60 + n, "not": {"pattern": "[ab]*a[ab]{18}"}}),
    "an expression of 25 loops": lambda n: {"regex": "(.*a){25}" + str(n)},
    "an ambiguous grammar": lambda n: {"grammar": f'root ::= e "{n}"\ne ::= "a" e "b" e | "b" e "a" e | "a" e e | "c"'},
    "200 structural tags": lambda n: {"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": [
        {"type": "tag", "begin": f"<{n}.{i}>", "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {
            f"p{j}": {"type": "string"} for j in range(20)}}}, "end": "</a>"} for i in range(200)]}}},
}


def form_rows(repeat):
    """(name, path, bodies), one for each time that it is sent."""
    for name, form in FORMS.items():
        yield "form: " + name, COMPLETIONS, [json.dumps({"prompt": "x", "max_tokens": 200, "structured_outputs": form(n)}).encode() for n in range(repeat)]


def rows(bench):
    """(name, path, body) of each request."""
    listed = subprocess.run([bench, "--list"], capture_output=True, text=True, check=True).stdout
    for index, line in enumerate(listed.splitlines()):
        name, path = line.split("\t")
        yield name, path, subprocess.run([bench, "--body", str(index)], capture_output=True, check=True).stdout
    strings = ",".join(['"' + "word " * 200_000 + '"'] * 30)
    yield "allowed: 30 MB without effect", COMPLETIONS, f'{{"prompt":"x","max_tokens":1,"made_up":[{strings}]}}'.encode()
    lists = ",".join(["[" + ",".join(["0"] * 30_000) + "]"] * 8)
    yield "allowed: 240,000 numbers", COMPLETIONS, f'{{"prompt":"x","max_tokens":1,"made_up":[{lists}]}}'.encode()


def send(port, path, body):
    """(begin, end, status)"""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin = time.monotonic()
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
    except OSError:
        pass  # refused before all of it was sent: the reply is there
    reply = connection.getresponse()
    reply.read()
    end = time.monotonic()
    connection.close()
    return begin, end, reply.status


def during(intervals, begin, end):
    return [(b, e) for b, e in intervals if e > begin and b < end]


def report(name, size_mb, status, windows, gaps, probes):
    def worst(intervals):
        lengths = sorted(1e3 * (e - b) for begin, end in windows for b, e in during(intervals, begin, end))
        return (lengths[len(lengths) // 2], lengths[-1]) if lengths else (0, 0)

    took_ms = 1e3 * max(end - begin for begin, end in windows)
    (gap, worst_gap), (probe, worst_probe) = worst(gaps), worst(probes)
    print(f"| {name} | {size_mb:.1f} | {status} | {took_ms:.0f} | {gap:.1f} / {worst_gap:.1f} | {probe:.1f} / {worst_probe:.1f} |")
    return worst_gap, worst_probe


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(TOP / "build/perigee"))
    parser.add_argument("--bench", default=str(TOP / "build/bench/edge_bench"))
    parser.add_argument("--model", default=str(TOP / "models/tiny-k2"))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    requests = [(name, path, [body] * options.repeat) for name, path, body in rows(options.bench)]
    requests += form_rows(options.repeat)
    sent = []
    with ServerProcess(options.program, options.model, ["--device", "cpu"]) as server:
        stop = multiprocessing.Event()
        clients = []
        for work in (read_stream, ask_livez):
            receiver, sender = multiprocessing.Pipe(False)
            process = multiprocessing.Process(target=work, args=(server.port, stop, sender), daemon=True)
            process.start()
            clients.append(receiver)
        time.sleep(1)
        begin = time.monotonic()
        time.sleep(QUIET_S)
        quiet = (begin, time.monotonic())
        for name, path, bodies in requests:
            replies = []
            for body in bodies:
                time.sleep(PAUSE_S)
                replies.append(send(server.port, path, body))
            sent.append((name, len(bodies[0]) / 1e6, replies))
        stop.set()
        times, probes = (receiver.recv() for receiver in clients)
    gaps = [(a, b) for a, b in zip(times, times[1:]) if a is not None and b is not None]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; ms: median / longest\n")
    print("| request | MB | status | took ms | gaps of the stream | /livez |\n|---|---|---|---|---|---|")
    report("none", 0, "-", [quiet], gaps, probes)
    worst = [report(name, size_mb, replies[0][2], [(begin, end) for begin, end, _ in replies], gaps, probes)
             for name, size_mb, replies in sent]
    print(f"\nlongest gap {max(gap for gap, _ in worst):.1f} ms, slowest /livez {max(probe for _, probe in worst):.1f} ms")


if __name__ == "__main__":
    main()
