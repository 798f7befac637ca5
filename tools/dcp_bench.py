#!/usr/bin/env python3
"""What ranks gain and pay by sharing a cache (decode context parallelism), a table or a picture in one command.

    tools/dcp_bench.py tables MODEL --tp 4 --dcp 1,4 --flags "--kv-cache-dtype fp8"
    tools/dcp_bench.py curves MODEL --tp 2 --dcp 1,2 --flags "--device cuda" --exchange-us 1:7,8:11,32:19 --layers 27

tables: the decode and prefill tables of vLLM's issue 40608, of a server for each dcp size (`perigee bench decode
--same-prompt`). curves: step time by context (`perigee bench context`) as SVG, and the context from which sharing pays
beside the one that follows from the measured time of a layer's exchange. Standard library only.
"""
import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile

from plot_layers import nice_limit
from server_process import TOP, ServerProcess

WIDTH, HEIGHT, LEFT, TOP_GAP, GAP = 320, 220, 64, 48, 80
COLOURS = ["#1b6ca8", "#c2571a", "#2e8b57", "#7b3f9e"]


def numbers(text):
    return [int(part) for part in text.split(",")]


def rank_flags(args, dcp):
    return ["--tensor-parallel-size", str(args.tp), "--decode-context-parallel-size", str(dcp), *shlex.split(args.flags)]


# --- Tables ---

def tables(args):
    most = max(numbers(args.concurrencies))
    for dcp in args.dcp:
        flags = rank_flags(args, dcp)
        print(f"\n## {os.path.basename(os.path.normpath(args.model))}, tp {args.tp}, dcp {dcp} {args.flags}\n", flush=True)
        with ServerProcess(args.program, args.model, ["--max-num-seqs", str(most), *flags]) as server:
            command = [args.program, "bench", "decode", "--same-prompt", "--port", str(server.port), "--contexts",
                       args.contexts, "--concurrencies", args.concurrencies, "--output-len", str(args.output_len)]
            subprocess.run(command, check=False)  # a cell without a figure is not the end
    return 0


# --- Curves ---

def measure(args, dcp):
    """{(batch, context): microseconds of a step} and the rows that were refused, with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "cells.json")
        command = [args.program, "bench", "context", args.model, "--batches", args.batches, "--contexts", args.contexts,
                   "--steps", str(args.steps), "--save-result", result, *rank_flags(args, dcp)]
        print(f"tp {args.tp}, dcp {dcp}", flush=True)
        subprocess.run(command, check=True)
        with open(result) as file:
            return json.load(file)["cells"]


def crossing(one, other):
    """The context from which `other` takes less time than `one`, between two that were measured; 0: from the first,
    None: at none of them."""
    contexts = sorted(set(one) & set(other))
    for i, context in enumerate(contexts):
        if other[context] > one[context]:
            continue
        if i == 0:
            return 0
        before = contexts[i - 1]
        loss, gain = other[before] - one[before], one[context] - other[context]
        return before + (context - before) * loss / (loss + gain)
    return None


def predicted_crossing(one, exchange_us, layers, ranks):
    """Where (1 - 1 / ranks) of the time that contexts take on their own owner pays for the exchanges: by the slope
    between the shortest and the longest context."""
    contexts = sorted(one)
    slope = (one[contexts[-1]] - one[contexts[0]]) / (contexts[-1] - contexts[0])
    return exchange_us * layers / ((1 - 1 / ranks) * slope) if slope > 0 else None


def label(context):
    if context is None:
        return "none"
    return f"{context / 1024:.0f}k" if context >= 1024 else f"{context:.0f}"


def break_evens(cells, args):
    """Lines of text: for each batch and dcp size, measured and predicted."""
    exchange = dict((int(b), float(us)) for b, us in (pair.split(":") for pair in args.exchange_us.split(",") if pair))
    for batch in sorted({batch for _, batch in cells}):
        one = cells.get((args.dcp[0], batch), {})
        for dcp in args.dcp[1:]:
            other = cells.get((dcp, batch), {})
            if len(set(one) & set(other)) < 2:
                yield f"batch {batch}, dcp {dcp}: too few cells fit"
                continue
            line = f"batch {batch}, dcp {dcp}: less time than dcp {args.dcp[0]} from {label(crossing(one, other))} on"
            if batch in exchange and args.layers:
                line += f", predicted {label(predicted_crossing(one, exchange[batch], args.layers, dcp))}"
            yield line


def graph_losses(rows, dcp):
    """Cells whose step takes longer by graphs than without."""
    for row in rows:
        if "step_us" in row and row["step_us"] > 1.03 * row["eager_us"]:
            yield (f"dcp {dcp}, batch {row['batch']}, context {row['context']}: {row['step_us']:.0f} us by graphs, "
                   f"{row['eager_us']:.0f} without")


def panel(cells, batch, dcps, x0):
    lines = {dcp: cells[dcp, batch] for dcp in dcps if cells.get((dcp, batch))}
    contexts = sorted({context for line in lines.values() for context in line})
    most = max((us for line in lines.values() for us in line.values()), default=1) / 1000
    top = nice_limit(most)

    def x(context):
        return x0 + WIDTH * math.log2(context / contexts[0]) / max(math.log2(contexts[-1] / contexts[0]), 1)

    def y(milliseconds):
        return TOP_GAP + HEIGHT * (1 - milliseconds / top)

    yield f'<text x="{x0}" y="{TOP_GAP - 16}" font-weight="bold">batch {batch}: ms a step</text>'
    for i in range(5):
        value = top * i / 4
        yield f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
        yield f'<text x="{x0 - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for context in contexts:
        yield f'<text x="{x(context):.1f}" y="{TOP_GAP + HEIGHT + 18}" text-anchor="middle">{label(context)}</text>'
    for dcp, line in lines.items():
        colour = COLOURS[dcps.index(dcp) % len(COLOURS)]
        points = " ".join(f"{x(context):.1f},{y(us / 1000):.1f}" for context, us in sorted(line.items()))
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for context, us in line.items():
            yield f'<circle cx="{x(context):.1f}" cy="{y(us / 1000):.1f}" r="3" fill="{colour}"/>'


def svg(cells, dcps, title):
    batches = sorted({batch for _, batch in cells})
    width, height = LEFT + len(batches) * (WIDTH + GAP), TOP_GAP + HEIGHT + 84
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           'font-size="12">')
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield f'<text x="{LEFT}" y="16">{title}: step time by tokens of context</text>'
    for i, batch in enumerate(batches):
        yield from panel(cells, batch, dcps, LEFT + i * (WIDTH + GAP))
    for i, dcp in enumerate(dcps):
        x, colour = LEFT + i * 110, COLOURS[i % len(COLOURS)]
        yield f'<line x1="{x}" x2="{x + 24}" y1="{height - 14}" y2="{height - 14}" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{x + 30}" y="{height - 10}">dcp {dcp}</text>'
    yield "</svg>"


def curves(args):
    cells, losses = {}, []
    for dcp in args.dcp:
        rows = measure(args, dcp)
        losses += graph_losses(rows, dcp)
        for row in rows:
            if "step_us" in row:
                cells.setdefault((dcp, row["batch"]), {})[row["context"]] = row["step_us"]
    for line in [*break_evens(cells, args), *(losses or ["no step takes longer by graphs than without (by more than 3 %)"])]:
        print(line)
    if args.svg:
        with open(args.svg, "w") as file:
            name = f"{os.path.basename(os.path.normpath(args.model))}, tp {args.tp} {args.flags}"
            file.write("\n".join(svg(cells, args.dcp, name)) + "\n")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tables", "curves"])
    parser.add_argument("model")
    parser.add_argument("--program", default=os.path.join(TOP, "build/perigee"))
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--dcp", type=numbers, default=[1, 4], help="sizes of groups, the one to compare with first")
    parser.add_argument("--flags", default="", help="further flags of the ranks, as one word")
    parser.add_argument("--contexts", help="tokens")
    parser.add_argument("--concurrencies", default="1,2,4,8,16,32,64,128", help="of tables")
    parser.add_argument("--output-len", type=int, default=256, help="of tables: tokens of each stream")
    parser.add_argument("--batches", default="1,8,32", help="of curves")
    parser.add_argument("--steps", type=int, default=30, help="of curves: measured in each cell")
    parser.add_argument("--exchange-us", default="", help="of curves: batch:microseconds,... of a layer's exchange")
    parser.add_argument("--layers", type=int, default=0, help="of curves: with latent attention")
    parser.add_argument("--svg", help="of curves: the file to draw")
    args = parser.parse_args()
    if args.contexts is None:
        args.contexts = "128,16384,32768,65536,131072" if args.what == "tables" else "8192,16384,32768,65536,131072,262144"
    return (tables if args.what == "tables" else curves)(args)


if __name__ == "__main__":
    sys.exit(main())
