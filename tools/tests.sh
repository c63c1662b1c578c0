#!/usr/bin/env bash
# Run the fast or the slow tests in two sessions: with the shape checks, and what uses torch.compile without them.
# Reports go to outputs/tests/*.xml, where tools/slowest.py reads them: `bash tools/tests.sh fast|slow`.
set -uo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
    fast) which="not slow" ;;
    slow) which="slow" ;;
    *) echo "tests: say fast or slow" >&2; exit 2 ;;
esac
pytest=("$(cd .venv/bin && pwd -P)/python" -m pytest)
mkdir -p outputs/tests
rm -f "outputs/tests/$1.xml" "outputs/tests/$1-compile.xml"

"${pytest[@]}" -m "$which and not compile" --jaxtyping-packages=diladiff,beartype.beartype --junitxml="outputs/tests/$1.xml"
first=$?
"${pytest[@]}" -m "$which and compile" --junitxml="outputs/tests/$1-compile.xml"
second=$?
[ "$second" -eq 5 ] && second=0 # no such test is no failure here; the first session has plenty
[ "$first" -eq 0 ] && [ "$second" -eq 0 ]
