#!/usr/bin/env python3
"""Draws utilization against driver time after the first creation, from measure.py's CSV.

usage: plot.py ROWS.csv > placement.svg
"""
import csv
import math
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 560, 70, 40, 240, 60
X_RANGE = (0.1, 1000.0)  # ms, logarithmic
Y_RANGE = (87.0, 100.0)  # percent
COLOURS = {"generate": "#1b9e77", "llama_varlen": "#d95f02", "lora": "#7570b3", "moe": "#e7298a",
           "rlhf": "#66a61e", "vit": "#a6761d"}


def x_of(ms):
    low, high = (math.log10(edge) for edge in X_RANGE)
    share = (math.log10(max(ms, X_RANGE[0])) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def y_of(percent):
    share = (percent - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def text(x, y, words, anchor="start"):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'


def axes():
    for ms in (0.1, 1, 10, 100, 1000):
        yield (f'<path d="M{x_of(ms):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>'
               + text(x_of(ms), HEIGHT - BOTTOM + 18, f"{ms:g}", "middle"))
    for percent in range(88, 101, 2):
        yield (f'<path d="M{LEFT} {y_of(percent):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
               + text(LEFT - 8, y_of(percent) + 4, f"{percent}", "end"))
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16,
               "driver time after the first creation, ms (the whole job)", "middle")
    yield text(LEFT, TOP - 14, "utilization, percent; number: handle size in MiB")


def marks(rows):
    for row in rows:
        is_new = row["policy"].startswith("kept")
        colour = COLOURS[row["trace"]]
        x = x_of(float(row["driver_time_after_first_us"]) / 1000)
        y = y_of(float(row["utilization"]) * 100)
        yield (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" stroke="{colour}" stroke-width="2" '
               f'fill="{colour if is_new else "white"}"/>'
               + text(x + 7, y + 4, f"{int(row['page_bytes']) >> 20}"))


def legend():
    x = WIDTH - RIGHT + 20
    for i, (trace, colour) in enumerate(COLOURS.items()):
        yield f'<circle cx="{x}" cy="{TOP + 20 * i}" r="5" fill="{colour}"/>'
        yield text(x + 12, TOP + 20 * i + 4, trace)
    for i, (fill, words) in enumerate((("#555", "kept mappings, lifetimes apart"),
                                       ("white", "unmapped at once, one zone"))):
        y = TOP + 150 + 20 * i
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="#555" stroke-width="2"/>'
        yield text(x + 12, y + 4, words)


def main(arguments):
    if len(arguments) != 1:
        sys.exit(__doc__)
    with open(arguments[0], encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
          'font-family="sans-serif" font-size="12">'
          f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for line in (*axes(), *marks(rows), *legend()):
        print(line)
    print("</svg>")


if __name__ == "__main__":
    main(sys.argv[1:])
