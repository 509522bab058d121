#!/usr/bin/env bash
# One night: measures STUDY.yaml again, keeps the night in history/ and compares it with BASELINE.
#
#   docs/ci/night.sh STUDY.yaml BASELINE
#
# ON_REGRESSION in the environment is a command line that runs on a regression (docs/gate.md). The exit code
# is 4 if another night has not ended, else that of bench compare.
set -euo pipefail
study=$1
baseline=$2
name=$(basename "$study" .yaml)
tell=()
if [ -n "${ON_REGRESSION:-}" ]; then
    tell=(--on-regression "$ON_REGRESSION")
fi

code=0
bench matrix "$study" --fresh --no-report || code=$?
# 1: a cell has no figure, which the comparison reports. Other codes: nothing was measured.
if [ "$code" -gt 1 ]; then
    exit "$code"
fi
bench history add "$name@latest" "${tell[@]}"
bench compare "$baseline" "$name@latest" "${tell[@]}" --format "markdown=runs/$name.md"
