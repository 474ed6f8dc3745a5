# Snapshots of PyTorch's shape from Python to `tenure` and back: what torch_snapshots.py checks.
exec python3 "$2/tests/cli/torch_snapshot_checks.py" "$1/tenure"
