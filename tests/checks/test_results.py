#!/usr/bin/env python3
"""Reads ctest's JUnit file: counts the tests and holds the skips against the list.

usage: test_results.py RESULTS.xml LISTED_SKIPS.txt

Prints `failed: NAME` for each test that failed, and last `N passed, N failed` or `N passed, N
failed, N skipped`. The exit status
is 1 if a test failed, if none ran, or if a test was skipped that the list does not name with a
reason. A line of the list is a ctest name or a pattern of names (gpu/*), white space, the reason;
'#' starts a comment.
"""
import fnmatch
import re
import sys

CASE = re.compile(r'<testcase name="([^"]*)"[^>]*\bstatus="([^"]*)"')


def read_list(path):
    """Names with their reasons, and what is wrong with the file."""
    listed, faults = {}, []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.split("#")[0].split(None, 1)
            if not words:
                continue
            if len(words) < 2:
                faults.append(f"{path}:{number}: {words[0]} is listed without a reason")
            if words[0] in listed:
                faults.append(f"{path}:{number}: {words[0]} is listed twice")
            listed[words[0]] = words[1].strip() if len(words) > 1 else ""
    return listed, faults


def read_cases(text):
    """Pairs of test name and status: run, fail, notrun (skipped) or disabled."""
    return CASE.findall(text)


def judge(cases, listed, list_path):
    """The lines to print before the counts, and the three counts."""
    lines = []
    passed = [name for name, status in cases if status == "run"]
    skipped = [name for name, status in cases if status in ("notrun", "disabled")]
    failed = len(cases) - len(passed) - len(skipped)
    unlisted = 0
    known = ("run", "notrun", "disabled")
    lines += [f"failed: {name}" for name, status in cases if status not in known]
    for name in skipped:
        reasons = [why for pattern, why in listed.items() if fnmatch.fnmatchcase(name, pattern)]
        if reasons:
            lines.append(f"skipped: {name}: {reasons[0]}")
        else:
            lines.append(f"{list_path}:1: {name} was skipped and is not listed here")
            unlisted += 1
    return lines, len(passed), failed + unlisted, len(skipped) - unlisted


def main(arguments):
    results, list_path = arguments
    listed, lines = read_list(list_path)
    try:
        with open(results, encoding="utf-8", errors="replace") as file:
            cases = read_cases(file.read())
    except OSError as error:
        cases = []
        lines.append(f"{results}: {error.strerror}: ctest wrote no results")
    faults = len(lines)
    more, passed, failed, skipped = judge(cases, listed, list_path)
    if not cases:
        more.append(f"{results}: no test ran")
        failed += 1
    failed += faults
    print("\n".join(lines + more))
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1:]))
