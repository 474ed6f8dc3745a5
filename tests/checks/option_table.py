#!/usr/bin/env python3
"""Holds the table of options in docs/tuning.md against the one in alloc/options.h.

usage: option_table.py ROOT         exit status 1 and a line for each option that differs
       option_table.py --self-test  plants differences and must see them
"""
import os
import re
import sys

ROW_OF_CODE = re.compile(
    r'X\(\w+,\s*\w+,\s*"(\w+)",\s*(NULL|"\w+"),\s*"([^"]*)",\s*"([^"]*)"\)')
ROW_OF_DOCS = re.compile(r"^\| `(TENURE_\w+)` \| ([^|]*?) ?\| ([^|]*?) \|$", re.M)


def options_of_code(text):
    """Variable -> (default, meaning), the meaning with the alias as the docs tell it."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    rows = {}
    for variable, alias, default, meaning in ROW_OF_CODE.findall(text):
        if alias != "NULL":
            meaning += f"; also `{alias.strip(chr(34))}`"
        rows[variable] = (default, meaning)
    return rows


def options_of_docs(text):
    return {variable: (default, meaning)
            for variable, default, meaning in ROW_OF_DOCS.findall(text)}


def differences(code, docs):
    for variable in sorted(code.keys() | docs.keys()):
        if code.get(variable) != docs.get(variable):
            yield (f"docs/tuning.md:1: {variable}: {docs.get(variable)} here, "
                   f"{code.get(variable)} in alloc/options.h")


def self_test():
    code = options_of_code('X(BOOL, a, "TENURE_A", NULL, "0", "first") \\\n'
                           '    X(TEXT, b, "TENURE_B", \\\n      "OLD_B", "", "second")\n')
    same = "| `TENURE_A` | 0 | first |\n| `TENURE_B` | | second; also `OLD_B` |\n"
    cases = [(same, 0), (same.replace("| 0 |", "| 1 |"), 1), (same.replace("first", "1st"), 1),
             (same.split("\n", maxsplit=1)[0] + "\n", 1), (same + "| `TENURE_C` | 0 | more |\n", 1)]
    for text, expected in cases:
        found = list(differences(code, options_of_docs(text)))
        if len(found) != expected:
            print(f"option_table.py: {expected} differences expected in {text!r}, got {found}")
            return 1
    return 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    texts = []
    for name in ("alloc/options.h", "docs/tuning.md"):
        with open(os.path.join(arguments[0], name), encoding="utf-8") as file:
            texts.append(file.read())
    texts[0] = re.sub(r"/\*.*?\*/", "", texts[0], flags=re.S)
    code = options_of_code(texts[0])
    if len(code) != len(re.findall(r"\bX\(\w+, \w+,", texts[0])):
        print("alloc/options.h:1: option_table.py does not understand all rows")
        return 1
    found = list(differences(code, options_of_docs(texts[1])))
    print("\n".join(found) if found else f"ok: {len(code)} options")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
