#!/usr/bin/env bash
# Whether the kernels are right, asked of a GPU: the operator's tests, compute-sanitizer and two
# million random rows, side by side, from the source tree, with the python3 at hand.
#
#     tools/check_cuda.sh LOGS
#
# Speed is measured afterwards, with nothing beside it: laprune bench operator --device cuda.
set -u
logs=$(mkdir -p "${1:?a folder for logs}" && cd "$1" && pwd) || exit
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

declare -A jobs
begin() {
    local name=$1
    shift
    "$@" >"$logs/$name.log" 2>&1 &
    jobs[$name]=$!
}
tests() { begin "$1" python3 -m pytest -p no:cacheprovider "${@:2}"; }

tests kernels tests/test_triton.py tests/test_cuda_launch.py tests/test_gpu.py
tests operator tests/test_operator.py tests/test_losses.py
tests edges tests/test_edges.py
tests gradients tests/test_gradients.py
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        begin $tool compute-sanitizer --tool $tool --error-exitcode 1 python3 tools/sanitize_cuda.py
    done
else
    echo "no compute-sanitizer: memory and races are not checked"
fi
begin million_rows python3 -m laprune \
    reproduce million_rows --device cuda --results "$logs/million_rows"

failed=0
for name in "${!jobs[@]}"; do
    if wait "${jobs[$name]}"; then verdict=passed; else verdict=FAILED failed=1; fi
    echo "$name $verdict: $(grep -v '^ *$' "$logs/$name.log" | tail -n 1)"
done
exit $failed
