#!/usr/bin/env python3
"""Holds the ops that the public headers declare against those that the op battery runs.

usage: battery_ops.py ROOT         exit status 1 and a line for each op that is nowhere
       battery_ops.py --self-test  plants differences and must see them

An op of ops/tenure_*.h must be called by a launch of tests/gpu/op_battery_*_support.c, or by the
program that is named below, which does for it what the battery does.
"""
import glob
import os
import re
import sys

ELSEWHERE = {
    "tn_gemm": "tests/gpu/test_gemm_accuracy.c",
    "tn_gemm_tune": "tests/gpu/test_gemm_lists.c",
    "tn_grouped_linear_forward": "tests/support/test_experts.c",
    "tn_grouped_linear_backward": "tests/support/test_experts.c",
    "tn_linear_forward": "tests/gpu/test_frozen_stack.c",
    "tn_linear_backward": "tests/gpu/test_frozen_stack.c",
    "tn_norm_linear_forward": "tests/support/test_layers.c",
    "tn_norm_linear_backward": "tests/support/test_layers.c",
    "tn_norm_mlp_forward": "tests/support/test_layers.c",
    "tn_norm_mlp_backward": "tests/support/test_layers.c",
    "tn_weight_gradient": "tests/support/test_layers.c",
}
DECLARED = re.compile(r"TN_API\s+TN_MUST_USE\s+tn_status\s+(tn_\w+)\("
                      r"(?:const tn_\w+_args \*args|tn_delayed_gradient \*\w+),[\w\s*,]*"
                      r"tn_stream stream\)")


def declared_ops(text):
    return set(DECLARED.findall(text))


def problems(headers, battery, elsewhere):
    """headers, battery: texts; elsewhere: op -> text of the program that runs it."""
    for name in sorted(declared_ops(headers)):
        text = elsewhere.get(name, battery)
        if not re.search(rf"\b{name}\(", text):
            yield f"{name}: no launch of the op battery calls it"
    for name in sorted(elsewhere.keys() - declared_ops(headers)):
        yield f"{name}: there is no such op"


def self_test():
    headers = ("TN_API TN_MUST_USE tn_status tn_a(const tn_a_args *args, tn_stream stream);\n"
               "TN_API TN_MUST_USE tn_status tn_b_forward(const tn_b_args *args,\n"
               "                                          tn_stream stream);\n"
               "TN_API const char *tn_name(int x);\n")
    battery = "return tn_a(&args, s); return tn_b_forward(&args, s);"
    cases = [(battery, {}, 0), ("tn_a(", {}, 1), ("", {}, 2), ("tn_a(", {"tn_b_forward": "x"}, 1),
             ("tn_a(", {"tn_b_forward": "tn_b_forward("}, 0), (battery, {"tn_c": ""}, 1)]
    for text, elsewhere, expected in cases:
        found = list(problems(headers, text, elsewhere))
        if len(found) != expected:
            print(f"battery_ops.py: {expected} expected for {text!r}, {elsewhere}, got {found}")
            return 1
    return 0


def read(root, pattern):
    texts = []
    for path in sorted(glob.glob(os.path.join(root, pattern))):
        with open(path, encoding="utf-8") as file:
            texts.append(file.read())
    return "\n".join(texts)


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    root = arguments[0]
    elsewhere = {name: read(root, path) for name, path in ELSEWHERE.items()}
    found = list(problems(read(root, "ops/tenure_*.h"),
                          read(root, "tests/gpu/op_battery_*_support.c"), elsewhere))
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
