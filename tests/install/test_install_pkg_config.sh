# Programs outside the tree are built with what pkg-config says of an installed Tenure, and run.
# usage: test_install_pkg_config.sh BUILD SOURCE
set -eu
build=$1
source=$2
. "$source/tests/install/install_support.sh"

folder=$(dirname "$(find "$prefix" -name tenure.pc)")
export PKG_CONFIG_PATH="$folder"
version=$(pkg-config --modversion tenure)
[ "$version" = "$(pkg-config --modversion tenure-ops)" ] ||
    { echo "FAIL: the versions differ"; exit 1; }
library_folder=$(pkg-config --variable=libdir tenure)
rpath=-Wl,-rpath,$(cd "$library_folder" && pwd)

outside=$source/tests/install/outside_project
# shellcheck disable=SC2046,SC2086
"${CC:-gcc}" -std=c17 $flags "$outside/outside_alloc.c" -o "$work/outside_alloc" \
    $(pkg-config --cflags --libs tenure) $rpath
# shellcheck disable=SC2046,SC2086
"${CXX:-g++}" -std=c++17 $flags "$outside/outside_ops.cpp" -o "$work/outside_ops" \
    $(pkg-config --cflags --libs tenure-ops) $rpath
# shellcheck disable=SC2046,SC2086
"${CC:-gcc}" -std=c17 $flags "$outside/outside_dist.c" -o "$work/outside_dist" \
    $(pkg-config --cflags --libs tenure-dist) $rpath
runs_installed "$work/outside_alloc"
runs_installed "$work/outside_dist"
runs_installed "$work/outside_ops"
echo "ok: pkg-config $version"
