#!/usr/bin/env python3
"""Says how far training in one recipe ends from training in another, over several seeds.

usage: compare_recipes.py TENURE_TRAIN OUT [--recipe NAME] [--against NAME] [--seeds N]
                          [--at-once N] [--rate X] [-- OPTION ...]

Each seed is trained three times: in the recipe, in the one that it is compared with, and again in
that one at a rate that is a ten-thousandth higher. That changes no quality but every bit, so it
shows how far two runs that are as good as each other end apart. Of each difference, in percent of
the loss, there are the mean over the seeds, the standard deviation and the standard error: a mean
that is more than two of its errors from 0, and not so in the repeated run, would be a bias.
OPTIONs are of tenure-train; its files are left in OUT.
"""
import argparse
import concurrent.futures
import csv
import math
import os
import statistics
import subprocess
import sys

FINAL_STEPS = 20
AGAIN = 1.0001


def arguments():
    own, others = sys.argv[1:], []
    if "--" in own:
        own, others = own[:own.index("--")], own[own.index("--") + 1:]
    parser = argparse.ArgumentParser(usage=__doc__.partition("usage: ")[2].partition("\n\n")[0])
    parser.add_argument("train")
    parser.add_argument("out")
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--against", default="bf16")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.001)
    options = parser.parse_args(own)
    if options.seeds < 2:
        parser.error("a spread takes two seeds or more")
    options.others = others
    return options


def run(options, name, recipe, rate, seed):
    """The path of the losses of one run."""
    path = os.path.join(options.out, f"{name}_{seed}.csv")
    command = [options.train, "--recipe", recipe, "--seed", str(seed), "--rate", f"{rate:.9g}",
               "--csv", path, *options.others]
    with open(path[:-4] + ".txt", "w", encoding="utf-8") as words:
        words.write("# " + " ".join(command) + "\n")
        words.flush()
        if subprocess.run(command, stdout=words, stderr=subprocess.STDOUT, check=False).returncode:
            sys.exit(f"{words.name}: the run failed")
    return path


def ends_of(path):
    """The mean of the last losses, and the last one of held-out text."""
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    held_out = [float(row["held_out"]) for row in rows if row["held_out"]]
    return statistics.fmean(losses[-FINAL_STEPS:]), held_out[-1]


def main():
    options = arguments()
    ways = ((options.recipe, options.recipe, options.rate),
            (options.against, options.against, options.rate),
            (options.against + "_again", options.against, options.rate * AGAIN))
    seeds = range(1, options.seeds + 1)
    os.makedirs(options.out, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        paths = {(way[0], seed): pool.submit(run, options, *way, seed)
                 for seed in seeds for way in ways}
        ends = {key: ends_of(path.result()) for key, path in paths.items()}
    print(f"% of {options.against}'s loss, {options.seeds} seeds")
    print(f"{'':12}{'':14}{'mean':>8}{'deviation':>11}{'error':>8}  each")
    for name in (options.recipe, options.against + "_again"):
        for place, what in enumerate(("last steps", "held out")):
            base = [ends[options.against, seed][place] for seed in seeds]
            apart = [100 * (ends[name, seed][place] - of) / of for seed, of in zip(seeds, base)]
            deviation = statistics.stdev(apart)
            print(f"{name:12}{what:14}{statistics.fmean(apart):+8.3f}{deviation:11.3f}"
                  f"{deviation / math.sqrt(len(apart)):8.3f}  "
                  + " ".join(f"{value:+.2f}" for value in apart))


main()
