#!/usr/bin/env python3
"""Holds the tree against the rules of CONTRIBUTING.md that a program can check.

usage: source_rules.py ROOT        prints FILE:LINE: what is wrong; exit status 1 if anything is
       source_rules.py --self-test plants one violation of each rule and must see it caught

Rules: file, function and line length; unique file names; includes go down only; banned calls; in
tests no skip that ctest can not see, no sleep, no group whose closing may fail unheard; nothing
left for later; no path of a build machine and no address of a package registry.
"""
import os
import re
import subprocess
import sys
import tempfile

FILE_LINES, FUNCTION_LINES, LINE_COLUMNS = 800, 70, 100
SOURCES = (".c", ".h", ".cpp", ".cu", ".cuh")
SCRIPTS = (".py", ".sh", ".cmake")
REPEATED_NAMES = {"README.md", "CMakeLists.txt", "main.c"}
LAYERS = {"alloc": 0, "tensor": 1, "ops": 2, "dist": 3, "adapters": 4}
PUBLIC_HEADER = re.compile(r"tenure_\w+\.h")

HOST_MEMORY = re.compile(r"(?<![\w.>])(malloc|calloc|realloc|free|strdup|strndup)\s*\(")
HOST_MEMORY_HOMES = re.compile(
    r"^(alloc/host_alloc\.c|alloc/driver_host\w*\.c|alloc/host_stream\w*\.c|alloc/jemalloc\w*\.c|"
    r"alloc/simcuda/|bench/|tests/|cmake/|docs/)")
DRIVER_CALL = re.compile(r"\bcu(Mem|Stream|Event|Ctx|Device|Init|Launch|Module)[A-Z]\w*\s*\(")
DRIVER_HOMES = re.compile(r"^(alloc/driver_cuda\w*\.[ch]|alloc/cuda_abi\.h|alloc/simcuda/|tests/)")
UNBOUNDED = re.compile(r"\b(sprintf|strcpy|strcat|gets|vsprintf)\s*\(")
LEFT_OVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
REGISTRY = re.compile(
    r"https?://[^\s)>\"]*(registry|mirror|proxy|artifact|nexus|pypi|\d+\.\d+\.\d+\.)")
HIDDEN_SKIP = re.compile(r"(?<![\w.>])skip\s*\(\s*\)")
CLOSED_GROUP = re.compile(r"\bcmocka_run_group_tests\w*\([^;]*,\s*(?!NULL\b)\w+\s*\)")
SLEEP = re.compile(r"\b(sleep|usleep|nanosleep|clock_nanosleep)\s*\(")
MACHINE_PATH = re.compile(r"(/work/(main|wt|shared)|/root/|/home/\w+/)")


def tracked_files(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.decode().split("\0")
    else:
        names = [os.path.relpath(os.path.join(folder, name), root)
                 for folder, _, files in os.walk(root) for name in files]
    return sorted(n for n in names if n and os.path.isfile(os.path.join(root, n)))


def without_comments(text):
    """The same lines with comments and the contents of strings blanked."""
    def blank(match):
        found = match.group(0)
        if found.startswith("/"):
            return re.sub(r"[^\n]", " ", found)
        return found[0] + " " * (len(found) - 2) + found[-1]
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text,
                  flags=re.S)


def check_lengths(name, text):
    lines = text.split("\n")
    if len(lines) - 1 > FILE_LINES:
        yield 1, f"{len(lines) - 1} lines: a file has at most {FILE_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_COLUMNS:
            yield number, f"{len(line)} columns: a line has at most {LINE_COLUMNS}"


def check_functions(name, code):
    """Functions are blocks whose brace closes in the first column, as clang-format leaves it."""
    start, depth = None, 0
    for number, line in enumerate(code.split("\n"), 1):
        opens, closes = line.count("{"), line.count("}")
        if depth == 0 and opens and re.match(r"^[A-Za-z_ ].*", line) and ")" in line:
            start = number
        depth += opens - closes
        if depth == 0 and closes and start is not None:
            if number - start > FUNCTION_LINES:
                yield start, f"{number - start} lines: a function has at most {FUNCTION_LINES}"
            start = None


def check_calls(name, code):
    for number, line in enumerate(code.split("\n"), 1):
        if HOST_MEMORY.search(line) and not HOST_MEMORY_HOMES.match(name):
            yield number, "host memory comes from tn__host_alloc (alloc/host_alloc.h)"
        if DRIVER_CALL.search(line) and not DRIVER_HOMES.match(name):
            yield number, "the driver is called through alloc/driver.h only"
        if UNBOUNDED.search(line):
            yield number, "an unbounded string call is banned: use snprintf or memcpy"
        if name.startswith("tests/") and HIDDEN_SKIP.search(line):
            yield number, "ctest does not see this skip: end the program with 77 and list it"
        if name.startswith("tests/") and SLEEP.search(line):
            yield number, "a test does not sleep: wait for what it waits for"
        if name.startswith("tests/") and CLOSED_GROUP.search(line):
            yield number, "cmocka passes a group that fails to close: use TEST_RUN_GROUP"


def check_includes(name, text, folder_of):
    layer = LAYERS.get(name.split("/")[0])
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match or layer is None:
            continue
        header = os.path.basename(match.group(1))
        target = folder_of.get(header)
        if target in LAYERS and LAYERS[target] > layer:
            yield number, f"{header} is of {target}/: includes go down only"
        if target in ("bench", "tests"):
            yield number, f"{header} is of {target}/: the library does not include it"
        if PUBLIC_HEADER.fullmatch(os.path.basename(name)) and not PUBLIC_HEADER.fullmatch(header):
            yield number, f"a public header includes public headers only, not {header}"


def check_words(name, text):
    for number, line in enumerate(text.split("\n"), 1):
        if LEFT_OVER.search(line):
            yield number, "something is left for later: do it or say it in an issue"
        if MACHINE_PATH.search(line):
            yield number, "a path of a build machine"
        if REGISTRY.search(line):
            yield number, "an address of a package registry"


def check_tree(root):
    names = tracked_files(root)
    folder_of = {os.path.basename(n): n.split("/")[0] for n in names if n.endswith(".h")}
    faults, seen = [], {}
    for name in names:
        base = os.path.basename(name)
        if name.endswith(SOURCES + SCRIPTS):
            if base in seen and base not in REPEATED_NAMES:
                faults.append(f"{name}:1: a file of this name is at {seen[base]}")
            seen[base] = name
        if not name.endswith(SOURCES + SCRIPTS + (".md", ".txt", ".json")):
            continue
        with open(os.path.join(root, name), encoding="utf-8", errors="replace") as file:
            text = file.read()
        found = []
        if base != "source_rules.py":
            found += check_words(name, text)
        if name.endswith(SOURCES + SCRIPTS):
            found += check_lengths(name, text)
        if name.endswith(SOURCES):
            code = without_comments(text)
            found += check_functions(name, code)
            found += check_calls(name, code)
            found += check_includes(name, text, folder_of)
        faults += [f"{name}:{number}: {words}" for number, words in sorted(found)]
    return faults


PLANTED = [
    ("alloc/long.c", "int x;\n" * (FILE_LINES + 1), "a file has at most"),
    ("alloc/wide.c", "/* " + "x" * LINE_COLUMNS + " */\n", "a line has at most"),
    ("alloc/tall.c", "int f(void) {\n" + "    g();\n" * (FUNCTION_LINES + 1) + "}\n",
     "a function has at most"),
    ("tensor/same.c", "int x;\n", None),
    ("alloc/same.c", "int x;\n", "a file of this name"),
    ("tensor/upper.h", "int x;\n", None),
    ("alloc/up.c", '#include "../tensor/upper.h"\n', "includes go down only"),
    ("alloc/tenure_alloc.h", '#include "private.h"\n', "includes public headers only"),
    ("alloc/memory.c", "void *f(void) { return malloc(3); }\n", "tn__host_alloc"),
    ("tensor/driver.c", "int f(void) { return cuMemMap(1); }\n", "alloc/driver.h only"),
    ("bench/text.c", "void f(char *s) { sprintf(s, \"x\"); }\n", "unbounded"),
    ("ops/later.c", "/* TO" + "DO: more */\n", "left for later"),
    ("tests/unit/test_skip.c", "void f(void) { skip(); }\n", "does not see this skip"),
    ("tests/unit/test_sleep.c", "void f(void) { sleep(1); }\n", "does not sleep"),
    ("tests/unit/test_close.c", "int main(void) { return cmocka_run_group_tests(t, NULL, end); }\n",
     "TEST_RUN_GROUP"),
    ("docs/registry.md", "from http:/" + "/mirror.example/\n", "package registry"),
    ("docs/path.md", "see /work/" + "main/x\n", "build machine"),
    ("ops/fine.c", "/* free(x) in a comment, \"malloc(3)\" too */\nint f(void) { return 1; }\n",
     None),
]


def self_test():
    with tempfile.TemporaryDirectory() as root:
        for name, text, _ in PLANTED:
            os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                file.write(text)
        faults = check_tree(root)
    missed = [name for name, _, words in PLANTED
              if words and not any(f.startswith((name, "tensor/same.c")) and words in f
                                   for f in faults)]
    wrong = [f for f in faults if f.startswith("ops/fine.c")]
    for name in missed:
        print(f"source_rules.py: the planted fault in {name} was not caught")
    for fault in wrong:
        print(f"source_rules.py: not a fault: {fault}")
    return 1 if missed or wrong else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    faults = check_tree(arguments[0])
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
