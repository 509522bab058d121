#!/usr/bin/env bash
# The gate of a change: measures STUDY.yaml and compares it with BASELINE.
#
#   docs/ci/gate.sh STUDY.yaml BASELINE [FOLDER]
#
# FOLDER (gate) gets the study and what CI reads: summary.md, junit.xml, annotations.txt, verdict.json,
# bencher.json, benchmark.json. The exit code is that of bench compare (docs/gate.md). Margins are in
# baselines/, never here.
set -euo pipefail
study=$1
baseline=$2
folder=${3:-gate}

if [ -e "$folder" ]; then
    echo "$folder is there already: remove it, or name another folder" >&2
    exit 2
fi
mkdir -p "$folder"
code=0
bench matrix "$study" --out "$folder/study" --no-report || code=$?
# 1: a cell has no figure, which the comparison reports. Other codes: nothing was measured.
if [ "$code" -gt 1 ]; then
    exit "$code"
fi
bench compare "$baseline" "$folder/study" \
    --format "markdown=$folder/summary.md" \
    --format "junit=$folder/junit.xml" \
    --format "github=$folder/annotations.txt" \
    --format "json=$folder/verdict.json" \
    --format "bencher=$folder/bencher.json" \
    --format "github-action-benchmark=$folder/benchmark.json"
