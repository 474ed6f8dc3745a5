# Each library exports what its headers declare and its symbol map lists, and no name more.
set -eu
python3 "$2/tests/checks/symbol_lists.py" --self-test
python3 "$2/tests/checks/symbol_lists.py" "$2" "$1"
