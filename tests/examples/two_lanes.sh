#!/bin/sh
# two_lanes.sh sums|trace|error PROGRAM: one behaviour of the example two_lanes.
set -eu
here=$(dirname "$0")
program=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

case $1 in
sums) # each launch sums all of its n values: n * first + n * (n - 1) / 2
    output=$("$program" "$folder/trace.json")
    n=262144
    for first in 0 1000 2000; do
        line="values from $first: sum $((n * first + n * (n - 1) / 2))"
        echo "$output" | grep -qxF "$line" || { echo "'$line' is missing in: $output"; exit 1; }
    done
    ;;
trace) # the trace keeps the viewers' rules and has both lanes' tasks, four a launch
    "$program" "$folder/trace.json" >"$folder/output"
    python3 "$here/../python/chrome_rules.py" "$folder/trace.json"
    python3 - "$folder/trace.json" <<'PYTHON'
import collections, json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
found = collections.Counter((e["tid"], e["name"]) for e in events if e["ph"] == "X")
for name in ("load", "sum"):
    assert 12 in [found[tid, name] for tid in tracks if tracks[tid] == name], (tracks, found)
PYTHON
    ;;
error) # a trace that cannot be written ends with status 1 and a text that names the file
    if "$program" "$folder/missing/trace.json" >"$folder/output" 2>"$folder/error"; then exit 1; fi
    grep -qF "$folder/missing/trace.json" "$folder/error" || { cat "$folder/error"; exit 1; }
    ;;
esac
