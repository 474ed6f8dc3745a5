"""Looks at the pages of `tenure report` in a headless Chromium.

    python3 report_page_checks.py TENURE CHROMIUM FOLDER

Makes pages of a snapshot of PyTorch's shape and of a pool's snapshot, runs report_page_checks.js in
them at two widths, light and dark, and takes screenshots of them without it. Pages and screenshots
stay in FOLDER, to be looked at.
"""
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import torch_snapshots as snapshots

TENURE, CHROMIUM, FOLDER = sys.argv[1], sys.argv[2], os.path.abspath(sys.argv[3])
HERE = os.path.dirname(os.path.abspath(__file__))
WIDTHS = {390: 844, 1400: 1000}
failures = 0


def path(name):
    return os.path.join(FOLDER, name)


def chromium(url, width, is_dark, *more):
    profile = tempfile.mkdtemp()
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--no-first-run", "--disable-extensions", "--disable-dev-shm-usage",
         "--disable-gpu-watchdog", "--disable-hang-monitor",  # on a busy machine all is slow
         f"--user-data-dir={profile}", f"--window-size={width},{WIDTHS[width]}",
         f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", *more, url],
        capture_output=True, text=True, timeout=240, check=False)
    shutil.rmtree(profile, ignore_errors=True)  # a process of it may still write there
    return done.stdout


def complain(words):
    global failures
    failures += 1
    print("FAILED:", words)


def check_page(name, expected, width, is_dark):
    with open(os.path.join(HERE, "report_page_checks.js"), encoding="utf-8") as file:
        script = file.read()
    with open(path(name + ".html"), encoding="utf-8") as file:
        page = file.read()
    script = script.replace("EXPECTED", json.dumps(dict(expected, isDark=is_dark)), 1)
    tested = path(f"{name}_tested.html")
    with open(tested, "w", encoding="utf-8") as file:
        file.write(page.replace("</body>", f"<script>{script}</script></body>"))
    dom = chromium("file://" + tested, width, is_dark, "--dump-dom")
    os.unlink(tested)
    found = re.search(r'<script type="application/json" id="check-results">(.*?)</script>', dom,
                      re.S)
    if not found:
        complain(f"{name} at {width}: no results in {len(dom)} bytes: {dom[-300:]}")
        return
    results = json.loads(found.group(1))
    for what, holds, detail in results:
        if not holds:
            complain(f"{name} at {width}, {'dark' if is_dark else 'light'}: {what}: {detail}")
    print(f"{name} at {width}: {len(results)} checks")


def take_screenshot(name, width, is_dark):
    file = path(f"{name}_{width}_{'dark' if is_dark else 'light'}.png")
    chromium("file://" + path(name + ".html"), width, is_dark, f"--screenshot={file}")
    with open(file, "rb") as picture:
        head = picture.read(24)
    if struct.unpack(">II", head[16:24]) != (width, WIDTHS[width]):
        complain(f"{file} is {struct.unpack('>II', head[16:24])}")


def make_pages():
    allocator = snapshots.Allocator(3)
    allocator.play(700)
    allocator.oom(1 << 45, 4096)
    with open(path("pytorch.pickle"), "wb") as file:
        pickle.dump(snapshots.snapshot(allocator), file)
    environment = dict(os.environ, TENURE_EVENTS="100000")
    subprocess.run([TENURE, "replay", path("pytorch.pickle"), "--snapshot", path("pool.json")],
                   check=True, capture_output=True, env=environment)
    for name, source in (("pytorch", "pytorch.pickle"), ("pool", "pool.json")):
        subprocess.run([TENURE, "report", path(source), "-o", path(name + ".html")], check=True)
    return {"peak": allocator.peak, "live": allocator.live, "largeBlocks": 10,
            "owners": ["train.py:42 forward", "layers.py:9 weights, biases"],
            "texts": ["Left at the end", "Owners with most"]}


os.makedirs(FOLDER, exist_ok=True)
expectation = make_pages()
out_of_memory = dict(expectation, texts=["Out of memory", "32.0 TiB"])
check_page("pytorch", out_of_memory, 390, True)
check_page("pytorch", out_of_memory, 1400, False)
check_page("pool", dict(expectation, texts=["Statistics", "Last events"]), 1400, True)
for screen in WIDTHS:
    for dark in (False, True):
        take_screenshot("pytorch", screen, dark)
print("failures:", failures)
sys.exit(failures > 0)
