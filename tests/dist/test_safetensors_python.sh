#!/bin/sh
# A saved checkpoint is what Python's library alone finds in it, by the rules of safetensors.
# usage: test_safetensors_python.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"$1/tests/unit_test_checkpoint" "$directory/latest" 2026 1000000
python3 "$2/tests/dist/safetensors_rules.py" "$directory/latest" 2026
