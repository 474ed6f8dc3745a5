# The rules of CONTRIBUTING.md that a program can check hold, and each check can fail.
set -eu
python3 "$2/tests/checks/source_rules.py" --self-test
python3 "$2/tests/checks/source_rules.py" "$2"
