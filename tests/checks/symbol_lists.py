#!/usr/bin/env python3
"""Holds what each library exports against what its headers declare and its symbol map lists.

usage: symbol_lists.py ROOT BUILD     compares headers, map and built library; exit status 1 and
                                      one line a difference if they are not the same
       symbol_lists.py ROOT --update  writes the maps anew from the headers
       symbol_lists.py --self-test    plants a difference of each kind and must see it named

A library's public names are those that its public headers declare with TN_API: node TENURE_0.
Names that only the sister libraries use are declared with TN_SISTER_API in the other headers of
the same folders: node TENURE_PRIVATE, without any promise.
"""
import os
import re
import subprocess
import sys
import tempfile

PUBLIC, PRIVATE = "TENURE_0", "TENURE_PRIVATE"

# Library, its map, and the folders whose headers declare what it exports.
LIBRARIES = [
    ("libtenure.so", "alloc/tenure.map", ("alloc", "tensor")),
    ("libtenure-ops.so", "ops/tenure_ops.map", ("ops",)),
    ("libtenure-dist.so", "dist/tenure_dist.map", ("dist",)),
    ("libtenure-adapters.so", "adapters/tenure_adapters.map", ("adapters",)),
    ("libtenure-torch.so", "adapters/torch/tenure_torch.map", ("adapters/torch",)),
]
MACROS = {"TN_API": PUBLIC, "TN_SISTER_API": PRIVATE}
DECLARATION = re.compile(r"^[ \t]*(TN_API|TN_SISTER_API)\b([^;{]*)[;{]", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def declared_name(words):
    """The name that `words`, a declaration without its macro, declares."""
    function = re.search(r"\b(\w+)\s*\(", words)
    if function:
        return function.group(1)
    return re.findall(r"\w+", re.sub(r"\[.*", "", words))[-1]


def headers_of(root, folders):
    for folder in folders:
        path = os.path.join(root, folder)
        if os.path.isdir(path):
            yield from (os.path.join(path, n) for n in sorted(os.listdir(path)) if n.endswith(".h"))


def names_of_headers(root, folders):
    """Name -> node, for all that the headers declare."""
    names = {}
    for path in headers_of(root, folders):
        with open(path, encoding="utf-8") as file:
            code = COMMENT.sub(" ", file.read())
        code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", code, flags=re.M)
        for macro, words in DECLARATION.findall(code):
            words = words.replace("TN_MUST_USE", " ")
            words = re.sub(r"(TN_PRINTF|__attribute__)\s*\(.*", "", words, flags=re.S)
            names[declared_name(words)] = MACROS[macro]
    return names


def names_of_map(path):
    """Name -> node, as a symbol map lists them."""
    with open(path, encoding="utf-8") as file:
        text = COMMENT.sub(" ", file.read())
    names = {}
    for node, body in re.findall(r"(\w*)\s*\{(.*?)\}", text, re.S):
        shown = re.search(r"global:(.*?)(?:local:|$)", body, re.S)
        if shown:
            names.update((name, node) for name in re.findall(r"[\w*?]+", shown.group(1)))
    return names


def names_of_library(path):
    """Name -> node, as the dynamic linker sees them."""
    listed = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", path],
                            capture_output=True, check=True, text=True).stdout
    names = {}
    for line in listed.splitlines():
        name, _, node = line.split()[-1].partition("@")
        if name not in (PUBLIC, PRIVATE):
            names[name] = node.lstrip("@")
    return names


def differences(left, left_words, right, right_words):
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield f"{name}: {left_words}, but not {right_words}"
        elif name not in left:
            yield f"{name}: {right_words}, but not {left_words}"
        elif left[name] != right[name]:
            yield f"{name}: {left[name]} where {left_words}, {right[name]} where {right_words}"


def map_text(library, names):
    lines = [f"/* What {library} exports. Written by tests/checks/symbol_lists.py --update. */"]
    for node, words in ((PUBLIC, "What the public headers declare."),
                        (PRIVATE, "For the sister libraries of the same version only.")):
        chosen = sorted(name for name, where in names.items() if where == node)
        if chosen or node == PUBLIC:
            lines += ["", f"/* {words} */", node + " {", "  global:"]
            lines += [f"    {name};" for name in chosen]
            lines += ["  local: *;", "};"] if node == PUBLIC else ["};"]
    return "\n".join(lines) + "\n"


def present(root):
    """The libraries whose headers this tree has, with the names that these declare."""
    for library, map_name, folders in LIBRARIES:
        names = names_of_headers(root, folders)
        if names:
            yield library, map_name, names


def update(root):
    for library, map_name, names in present(root):
        with open(os.path.join(root, map_name), "w", encoding="utf-8") as file:
            file.write(map_text(library, names))
    return 0


def check(root, build):
    """Lines that say what differs; none if headers, maps and libraries agree."""
    faults = []
    for library, map_name, declared in present(root):
        path = os.path.join(root, map_name)
        if not os.path.isfile(path):
            faults.append(f"{map_name}:1: missing: run tests/checks/symbol_lists.py --update")
            continue
        mapped = names_of_map(path)
        found = list(differences(declared, "declared in a header", mapped, "in the map"))
        built = os.path.join(build, library)
        if os.path.isfile(built):
            exported = names_of_library(built)
            found += differences(mapped, "in the map", exported, f"exported by {library}")
        else:
            found.append(f"{built} was not built")
        faults += [f"{map_name}:1: {words}" for words in found]
    return faults


HEADER = """/* TN_API int tn_comment(void); */
#define TN_API __attribute__((visibility("default")))
TN_API int tn_first(int (*callback)(void));
TN_API extern const int tn_second[2];
"""
SOURCE = """#include "tenure_ops.h"
int tn_first(int (*callback)(void)) { return callback(); }
const int tn_second[2] = {1, 2};
int tn_third(void);
int tn_third(void) { return 3; }
"""
# What is changed in the small tree, and the words that must come of it.
PLANTED = [
    ("nothing", lambda text, map_: (text, map_), None),
    ("a declaration more", lambda text, map_: (text + "TN_API int tn_third(void);\n", map_),
     "tn_third: declared in a header, but not in the map"),
    ("an export less", lambda text, map_: (text + "TN_API int tn_fourth(void);\n",
                                           map_.replace("tn_first;", "tn_first; tn_fourth;")),
     "tn_fourth: in the map, but not exported"),
    ("a map that lets all out", lambda text, map_: (text, map_.replace("local: *;", "local: x;")),
     "tn_third: exported by libtenure-ops.so, but not in the map"),
    ("a name in the wrong node", lambda text, map_: (text, map_.replace(PUBLIC, PRIVATE)),
     f"tn_second: {PUBLIC} where declared in a header, {PRIVATE} where in the map"),
]


def self_test():
    failures = 0
    for what, plant, expected in PLANTED:
        with tempfile.TemporaryDirectory() as root:
            os.mkdir(os.path.join(root, "ops"))
            files = dict(zip(("tenure_ops.h", "tenure_ops.map"),
                             plant(HEADER, map_text("x", {"tn_first": PUBLIC,
                                                          "tn_second": PUBLIC}))))
            files["source.c"] = SOURCE
            for name, text in files.items():
                with open(os.path.join(root, "ops", name), "w", encoding="utf-8") as file:
                    file.write(text)
            subprocess.run(
                [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", "libtenure-ops.so",
                 "ops/source.c", "-Wl,--version-script=ops/tenure_ops.map"], cwd=root, check=True)
            faults = check(root, root)
        if (expected is None and faults) or (
                expected and not any(expected in fault for fault in faults)):
            print(f"symbol_lists.py: {what}: expected {expected}, got {faults}")
            failures += 1
    return 1 if failures else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments[1] == "--update":
        return update(arguments[0])
    faults = check(*arguments)
    print("\n".join(faults) if faults else "ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
