#!/usr/bin/env python3
"""Draws loss curves from the CSV files of tenure-train, several in one plot, and says how far the
last 20 steps and the held-out text of each are from the last one named.

usage: plot_loss.py [--title WORDS] NAME=FILE.csv ... > loss.svg
"""
import csv
import html
import math
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 520, 60, 40, 200, 50
COLOURS = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
FINAL_STEPS = 20


def read_curve(path):
    """Losses by step, and (step, loss) of what was held out."""
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    held_out = [(int(row["step"]), float(row["held_out"])) for row in rows if row["held_out"]]
    if not losses or not held_out:
        sys.exit(f"{path}: no losses")
    return losses, held_out


def final_of(losses):
    last = losses[-FINAL_STEPS:]
    return sum(last) / len(last)


class Axes:
    def __init__(self, curves):
        values = [loss for losses, held_out in curves
                  for loss in losses + [value for _, value in held_out]]
        self.steps = max(len(losses) for losses, _ in curves)
        self.low, self.high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2

    def x(self, step):
        return LEFT + step / self.steps * (WIDTH - LEFT - RIGHT)

    def y(self, loss):
        share = (loss - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def lines(self, title):
        for i in range(7):
            step = self.steps * i / 6
            yield (f'<path d="M{self.x(step):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>'
                   + text(self.x(step), HEIGHT - BOTTOM + 18, f"{step:.0f}", "middle"))
        for i in range(int((self.high - self.low) * 2) + 1):
            loss = self.low + i / 2
            yield (f'<path d="M{LEFT} {self.y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
                   + text(LEFT - 8, self.y(loss) + 4, f"{loss:.1f}", "end"))
        yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "steps", "middle")
        yield text(LEFT, TOP - 14, title)


def text(x, y, words, anchor="start"):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def curve(axes, losses, held_out, colour):
    points = " ".join(f"{axes.x(step):.1f},{axes.y(loss):.1f}" for step, loss in enumerate(losses))
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1"/>'
    for step, loss in held_out:
        yield (f'<circle cx="{axes.x(step):.1f}" cy="{axes.y(loss):.1f}" r="4" fill="white" '
               f'stroke="{colour}" stroke-width="2"/>')


def legend(names, curves):
    x = WIDTH - RIGHT + 16
    for i, (name, (losses, held_out)) in enumerate(zip(names, curves)):
        colour, y = COLOURS[i % len(COLOURS)], TOP + 60 * i
        yield f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="3"/>'
        yield text(x + 26, y + 4, name)
        yield text(x + 26, y + 20, f"last {FINAL_STEPS} steps {final_of(losses):.4f}")
        yield text(x + 26, y + 36, f"held out {held_out[-1][1]:.4f}")
    yield text(x, HEIGHT - BOTTOM, "circles: held-out text")


def compare(names, curves):
    last, (last_losses, last_held_out) = names[-1], curves[-1]
    for name, (losses, held_out) in zip(names[:-1], curves[:-1]):
        train = final_of(losses) / final_of(last_losses) - 1
        held = held_out[-1][1] / last_held_out[-1][1] - 1
        print(f"{name} against {last}: last {FINAL_STEPS} steps {100 * train:+.3f} %, "
              f"held out {100 * held:+.3f} %", file=sys.stderr)


def main(arguments):
    title = "loss in nats a byte, of each step"
    if arguments[:1] == ["--title"] and len(arguments) > 1:
        title, arguments = arguments[1], arguments[2:]
    pairs = [argument.split("=", 1) for argument in arguments]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        sys.exit(__doc__)
    names = [name for name, _ in pairs]
    curves = [read_curve(path) for _, path in pairs]
    axes = Axes(curves)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
          'font-family="sans-serif" font-size="12">'
          f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for line in axes.lines(title):
        print(line)
    for i, (losses, held_out) in enumerate(curves):
        for line in curve(axes, losses, held_out, COLOURS[i % len(COLOURS)]):
            print(line)
    for line in legend(names, curves):
        print(line)
    print("</svg>")
    compare(names, curves)


if __name__ == "__main__":
    main(sys.argv[1:])
