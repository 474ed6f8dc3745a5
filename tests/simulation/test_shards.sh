#!/bin/sh
# The shards of `pool_simulation --sequences` are the whole: each sequence falls to exactly one.
#   test_shards.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
program=$1/tests/pool_simulation
shards=5

# The sequences of all backings that a run tells of.
sequences() {
    "$program" --sequences 3 "$@" | awk '/ programs,/ { sum += $1 } END { print sum + 0 }'
}

whole=$(sequences)
sum=0
shard=1
while [ $shard -le $shards ]; do
    part=$(sequences --shard $shard/$shards)
    [ "$part" -gt 0 ] || { echo "shard $shard of $shards is empty"; exit 1; }
    sum=$((sum + part))
    shard=$((shard + 1))
done
if [ "$sum" -ne "$whole" ] || [ "$whole" -ne 768 ]; then
    echo "$shards shards add up to $sum sequences of $whole"
    exit 1
fi
