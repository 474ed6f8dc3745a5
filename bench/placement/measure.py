#!/usr/bin/env python3
"""Replays traces with handles of several sizes on the simulated device and writes a CSV.

usage: measure.py TENURE POLICY SIZES TRACE... > rows.csv     SIZES: such as 2MiB,4MiB

Each row: policy, trace, handle size, events, peak live bytes, peak reserved bytes, utilization,
driver calls, driver time in all and after the first creation, allocations that failed on a device
of peak live / 0.99 bytes (2 MiB rounded up), races.
"""
import csv
import json
import math
import os
import subprocess
import sys

COLUMNS = ("policy", "trace", "page_bytes", "events", "peak_live_bytes", "peak_reserved_bytes",
           "utilization", "driver_calls", "driver_time_us", "driver_time_after_first_us",
           "tight_oom_count", "races")


def replay(tenure, trace, page, memory=None):
    command = [tenure, "replay", trace, "--driver", "sim", "--json"]
    if memory:
        command += ["--device-memory", str(memory)]
    environment = dict(os.environ, TENURE_PAGE_BYTES=page)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return json.loads(done.stdout)


def measure(tenure, policy, page, trace):
    wide = replay(tenure, trace, page)
    unit = 2 << 20
    tight = replay(tenure, trace, page, math.ceil(wide["peak_live_bytes"] / 0.99 / unit) * unit)
    row = dict(wide, policy=policy, trace=os.path.basename(trace).split(".")[0],
               driver_time_after_first_us=round(wide["driver_time_after_first_us"]),
               tight_oom_count=tight["oom_count"])
    return {name: row[name] for name in COLUMNS}


def main(arguments):
    if len(arguments) < 4:
        sys.exit(__doc__)
    tenure, policy, sizes = arguments[:3]
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for page in sizes.split(","):
        for trace in arguments[3:]:
            writer.writerow(measure(tenure, policy, page, trace))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
