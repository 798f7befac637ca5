#!/usr/bin/env python3
"""Draws what bench/layers_bench prints: time of one layer by context, as SVG on standard output.

    build/bench/layers_bench 2 | tools/plot_layers.py > docs/kimi_linear_layers.svg

Standard library only.
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 220, 64, 48, 90
COLOURS = {"KDA": "#1b6ca8", "MLA": "#c2571a"}
NAMES = {"KDA": "Kimi Delta Attention", "MLA": "latent attention"}


def nice_limit(value):
    """The least of 1, 2, 5 times a power of ten that is not below value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value)


def panel(rows, title, x0):
    contexts = sorted({row["context"] for row in rows})
    top = nice_limit(max(row["us"] for row in rows) / 1000)

    def x(context):
        span = max(math.log2(contexts[-1] / contexts[0]), 1)
        return x0 + WIDTH * math.log2(context / contexts[0]) / span

    def y(milliseconds):
        return TOP + HEIGHT * (1 - milliseconds / top)

    yield f'<text x="{x0}" y="{TOP - 16}" font-weight="bold">{title}</text>'
    for i in range(5):
        value = top * i / 4
        yield f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
        yield f'<text x="{x0 - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for context in contexts:
        label = f"{context // 1024}k" if context >= 1024 else str(context)
        yield f'<text x="{x(context):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>'
    yield f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">tokens of context</text>'
    for layer, colour in COLOURS.items():
        line = sorted((row["context"], row["us"] / 1000) for row in rows if row["layer"] == layer)
        points = " ".join(f"{x(context):.1f},{y(value):.1f}" for context, value in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for context, value in line:
            yield f'<circle cx="{x(context):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'


def main():
    rows = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    sizes = sorted({row["tokens"] for row in rows})
    width, height = LEFT + len(sizes) * (WIDTH + GAP), TOP + HEIGHT + 84
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
          'font-family="sans-serif" font-size="12">')
    print(f'<rect width="{width}" height="{height}" fill="white"/>')
    for i, tokens in enumerate(sizes):
        title = "one token, ms a layer" if tokens == 1 else f"chunk of {tokens} tokens, ms a layer"
        for element in panel([row for row in rows if row["tokens"] == tokens], title, LEFT + i * (WIDTH + GAP)):
            print(element)
    for i, (layer, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 190
        print(f'<line x1="{x}" x2="{x + 24}" y1="{height - 14}" y2="{height - 14}" stroke="{colour}" stroke-width="2"/>')
        print(f'<text x="{x + 30}" y="{height - 10}">{NAMES[layer]}</text>')
    print("</svg>")


if __name__ == "__main__":
    main()
