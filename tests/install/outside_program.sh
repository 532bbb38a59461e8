#!/usr/bin/env bash
# outside_program.sh BUILD CMAKE CC: installs the build into an empty folder, moves it, and builds
# and runs program.c against it, through pkg-config and through find_package.
set -euo pipefail
build=$1 cmake=$2 cc=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --component c --prefix "$work/first" >/dev/null
mv "$work/first" "$work/tree"
library=$(find "$work/tree" -name libpenstock.so)
libdir=$(dirname "$library")

echo "== exported names are public ones"
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}')
grep -qx pst_graph_launch <<<"$exported"
if grep -vE '^pst_[a-z]' <<<"$exported" || grep -E '^pst_je_' <<<"$exported"; then
    echo "these names must not be visible in libpenstock.so" >&2
    exit 1
fi

echo "== pkg-config"
export PKG_CONFIG_PATH=$libdir/pkgconfig
# shellcheck disable=SC2046 # flags are words
"$cc" -std=c11 -Wall -Wextra -Werror "$here/program.c" -o "$work/by_pkg_config" \
    $(pkg-config --cflags --libs penstock)
LD_LIBRARY_PATH=$libdir "$work/by_pkg_config"

echo "== find_package"
"$cmake" -S "$here" -B "$work/build" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$work/tree" \
    >/dev/null
"$cmake" --build "$work/build" >/dev/null
"$work/build/program"
