#!/usr/bin/env python3
"""How long the page of a long trace takes: to make, and to open in a headless Chromium.

    python3 bench/report/open_time.py build/release/tenure [EVENTS [TIMES]]

Prints the bytes of the page, the seconds of `tenure report`, and for each opening the seconds from
the beginning of the navigation to the end of the first drawing, by the browser's own clock.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

TENURE = sys.argv[1]
EVENTS = sys.argv[2] if len(sys.argv) > 2 else "1000000"
TIMES = int(sys.argv[3]) if len(sys.argv) > 3 else 3
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli",
                      "long_trace.awk")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def open_page(browser, page, profile):
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                           f"--user-data-dir={profile}", "--window-size=1400,1000",
                           "file://" + page], capture_output=True, text=True, check=True)
    return int(re.search(r'data-drawn="(\d+)"', done.stdout).group(1)) / 1000


def main():
    browser = next((shutil.which(name) for name in BROWSERS if shutil.which(name)), None)
    if not browser:
        sys.exit("open_time: no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        trace, page = os.path.join(folder, "long.csv"), os.path.join(folder, "long.html")
        with open(trace, "w", encoding="utf-8") as file:
            subprocess.run(["awk", "-v", f"events={EVENTS}", "-f", SCRIPT], stdout=file, check=True)
        begin = time.monotonic()
        subprocess.run([TENURE, "report", trace, "-o", page], check=True)
        print(f"{EVENTS} events, page of {os.path.getsize(page)} bytes, "
              f"made in {time.monotonic() - begin:.2f} s")
        for number in range(TIMES):
            print(f"opened and drawn in {open_page(browser, page, folder + '/profile'):.2f} s "
                  f"({'cold' if number == 0 else 'again'})")


main()
