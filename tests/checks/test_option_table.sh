# The documented options are those of the code, with the same defaults and words.
set -eu
python3 "$2/tests/checks/option_table.py" --self-test
python3 "$2/tests/checks/option_table.py" "$2"
