#!/usr/bin/env python3
"""Writes the tables of emulated kernels and of their shared memory, from the compiled files.

usage: list_kernels.py OBJDUMP OUTPUT HEADERS IMAGE=OBJECT ...

HEADERS are those that declare the kernels' arguments, with ; between them. A kernel is a global
function IMAGE::name(type) with one argument of a type of ours. Shared memory is what lies in .bss:
device code has no other variables.
"""
import re
import subprocess
import sys


def symbols(objdump, options, obj):
    listed = subprocess.run([objdump, options, obj], capture_output=True, check=True)
    return listed.stdout.decode().split("\n")


def kernels_of(objdump, image, obj):
    pattern = re.compile(r" \.text\S*\s+[0-9a-f]+ (?:\.hidden )?%s::(\w+)\((tn__\w+)\)$"
                         % re.escape(image))
    found = [pattern.search(line) for line in symbols(objdump, "-tC", obj)]
    return sorted(match.groups() for match in found if match)


def shared_of(objdump, obj):
    pattern = re.compile(r" O \.bss\S*\s+([0-9a-f]+) (?:\.hidden )?(_Z\S+)$")
    found = [pattern.search(line) for line in symbols(objdump, "-t", obj)]
    return [(match.group(2), int(match.group(1), 16)) for match in found if match]


def main(arguments):
    if len(arguments) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    objdump, output, headers = arguments[:3]
    images = [argument.split("=", 1) for argument in arguments[3:]]
    lines = ['/* The kernels of each image. */', '#include "emulated_cuda.h"']
    lines += [f'#include "{header}"' for header in headers.split(";")]
    rows, externals, shared, shared_rows = [], [], [], []
    for image, obj in images:
        kernels = kernels_of(objdump, image, obj)
        if not kernels:
            print(f"list_kernels.py: {obj} has no kernel", file=sys.stderr)
            return 1
        for symbol, size in shared_of(objdump, obj):
            variable = f"shared_{len(shared)}"
            shared.append(f'extern unsigned char {variable}[] __asm__("{symbol}");')
            shared_rows.append(f'    {{"{image}", {variable}, {size}}},')
        lines.append(f"namespace {image} {{")
        lines += [f"void {name}({kind});" for name, kind in kernels]
        lines.append("}")
        rows += [f"    EMULATED_KERNEL({image}, {name}, {kind})," for name, kind in kernels]
        externals.append(f'extern const unsigned char tn__{image}_image[];')
        externals.append(f'const unsigned char tn__{image}_image[] = "{image}";')
    lines += ["const emulated_kernel emulated_kernels[] = {"] + rows + ["};"]
    lines.append("const size_t emulated_kernel_count = sizeof emulated_kernels / "
                 "sizeof *emulated_kernels;")
    lines += shared + ["const emulated_shared emulated_shared_memory[] = {"] + shared_rows
    lines += ["    {nullptr, nullptr, 0}};"]
    lines += ['extern "C" {'] + externals + ["}"]
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
