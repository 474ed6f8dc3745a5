#!/usr/bin/env python3
"""Plays traces again and again in one pool on the simulated device; a row for each pass.

usage: repeats.py TENURE PASSES TRACE... > rows.csv

Each row: trace, pass, driver calls, their time, and the utilization of all passes together: peak
live / peak reserved.
"""
import csv
import json
import os
import subprocess
import sys

COLUMNS = ("trace", "pass", "driver_calls", "driver_time_us", "utilization")


def passes(tenure, count, trace):
    done = subprocess.run([tenure, "replay", trace, "--driver", "sim", "--repeat", count, "--json"],
                          capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    for number, one in enumerate(result["passes"], 1):
        yield {"trace": os.path.basename(trace).split(".")[0], "pass": number,
               "driver_calls": one["driver_calls"],
               "driver_time_us": round(one["driver_time_us"]),
               "utilization": round(result["utilization"], 4)}


def main(arguments):
    if len(arguments) < 3:
        sys.exit(__doc__)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for trace in arguments[2:]:
        writer.writerows(passes(arguments[0], arguments[1], trace))


if __name__ == "__main__":
    main(sys.argv[1:])
