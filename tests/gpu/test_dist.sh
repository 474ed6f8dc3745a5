#!/bin/sh
# The rank tests over NCCL on all GPUs of this machine; skipped (77) with fewer than two.
#
# usage: test_dist.sh BUILD SOURCE
set -eu
exec sh "$2/tests/gpu_dist.sh" "$1"
