#!/bin/sh
# Builds the plug-ins of tenure-bench-peers, for those peers whose headers are given.
#
# usage: bench/peers/build_plugins.sh OUT CUDA [TORCH [RMM RAPIDS_LOGGER]]
#
# CUDA, TORCH, RMM and RAPIDS_LOGGER are the folders that hold include/ and lib (or lib64): of the
# toolkit, of the torch package, and of the packages librmm and rapids_logger. "-" leaves one out.
set -eu
[ $# -ge 2 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
out=$1 cuda=$2 torch=${3:--} rmm=${4:--} logger=${5:--}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
flags="-O2 -fPIC -shared -I$here -I$cuda/include"

cc -std=gnu17 $flags "$here/plugin_async.c" -o "$out/peer_async.so" -L"$cuda/lib" -L"$cuda/lib64" \
    -lcudart
[ "$torch" = - ] || c++ -std=c++20 $flags -I"$torch/include" "$here/plugin_torch.cpp" \
    -o "$out/peer_torch.so" -L"$torch/lib" -lc10_cuda -lc10
[ "$rmm" = - ] || c++ -std=c++20 $flags -DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE \
    -I"$rmm/include" -I"$rmm/include/rapids" -I"$logger/include" "$here/plugin_rmm.cpp" \
    -o "$out/peer_rmm.so" -L"$rmm/lib64" -L"$logger/lib64" -lrmm -lrapids_logger \
    -L"$cuda/lib" -L"$cuda/lib64" -lcudart
