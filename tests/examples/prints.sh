#!/bin/sh
# prints.sh LINE... -- PROGRAM [ARGUMENT...]: the program ends well and its output is these lines.
set -eu
wanted=
while [ "$1" != -- ]; do
    wanted="$wanted$1
"
    shift
done
shift
output=$("$@")
[ "$output" = "${wanted%?}" ] || {
    printf 'wanted:\n%s\ngot:\n%s\n' "$wanted" "$output"
    exit 1
}
