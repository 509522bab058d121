#!/usr/bin/env bash
# The gate of a change: compares HEAD with BASE, a git revision, in paired mode on this machine.
#
#   bench/gate.sh STUDY.yaml BASE [FOLDER]
#
# Against the branch that a change is for, a drift of 1 % a change is never reported: where the checkout has
# baselines/accepted.yaml, the commit that it names is compared with in place of BASE (docs/gate.md).
# FOLDER (gate) gets the pairs, their pages in site/, and what CI reads: summary.md, junit.xml, annotations.txt, verdict.json,
# bencher.json, benchmark.json. The exit code is that of bench compare (docs/gate.md).
set -euo pipefail
study=$1
base=$2
folder=${3:-gate}

if [ -e "$folder" ]; then
    echo "$folder is there already: remove it, or name another folder" >&2
    exit 2
fi
if [ -e baselines/accepted.yaml ]; then
    base=baselines/accepted.yaml
fi
mkdir -p "$folder"
code=0
bench compare --ab "$base" HEAD --out "$folder/pairs" \
    --format "markdown=$folder/summary.md" \
    --format "junit=$folder/junit.xml" \
    --format "github=$folder/annotations.txt" \
    --format "json=$folder/verdict.json" \
    --format "bencher=$folder/bencher.json" \
    --format "github-action-benchmark=$folder/benchmark.json" \
    -- "$study" || code=$?
bench site "$folder/pairs" -o "$folder/site" || echo "the pages of the pairs could not be written" >&2
# A runner that is too busy to compare anything is no fault of the change.
if [ "$code" = 3 ] && grep -q '"nothing compared"' "$folder/verdict.json"; then
    echo "nothing was compared: see $folder/summary.md" >&2
    exit 0
fi
exit "$code"
