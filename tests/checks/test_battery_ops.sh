# The op battery runs every op that the public headers declare.
set -eu
python3 "$2/tests/checks/battery_ops.py" --self-test
python3 "$2/tests/checks/battery_ops.py" "$2"
