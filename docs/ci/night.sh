#!/usr/bin/env bash
# One night: measures STUDY.yaml again, keeps the night in history/ and compares it with BASELINE.
#
#   bench/night.sh STUDY.yaml BASELINE
#
# ON_REGRESSION in the environment is a command line that runs on a regression (docs/gate.md). runs/STUDY.md gets
# the verdicts. Where nothing was measured, the exit code is that of bench matrix: 4 if another night has not
# ended. Else it is that of bench compare, or of bench history add if only that failed.
set -euo pipefail
study=$1
baseline=$2
name=$(basename "$study")
name=${name%.*}
tell=()
if [ -n "${ON_REGRESSION:-}" ]; then
    tell=(--on-regression "$ON_REGRESSION")
fi
# The verdicts of another night are not this one's.
rm -f "runs/$name.md"
# An installed bench does not know which commit it was installed from.
if commit=${BENCH_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}; then
    export BENCH_COMMIT=$commit
fi

shopt -s nullglob
before=(runs/"$name"-*Z-*/plan-*.json)
code=0
bench matrix "$study" --fresh --name "$name" --no-report || code=$?
after=(runs/"$name"-*Z-*/plan-*.json)
# A cell without a figure is a matter of the comparison, as long as there is a study of this night.
if [ "$code" -gt 1 ] || { [ "$code" = 1 ] && [ ${#after[@]} = ${#before[@]} ]; }; then
    exit "$code"
fi
kept=0
bench history add "$name@latest" "${tell[@]}" || kept=$?
bench compare "$baseline" "$name@latest" "${tell[@]}" --format "markdown=runs/$name.md"
exit "$kept"
