#!/usr/bin/env bash
# The first hour on a GPU, step by step: bash benchmark/gpu.sh [arguments of benchmark/cost/gpu.py]
#
#     STEPS="ppo grpo" bash benchmark/gpu.sh --trl    # only these steps
#
# A step is a process of its own, which is ended if it takes longer than LIMIT (9 minutes). The exit status is 1 if a step
# has failed or found a problem. PYTHON names an interpreter that has the packages, unless the active one or .venv has them.
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for python in ${PYTHON:-python .venv/bin/python python3}; do
    if "$python" -c "import accelerate, datasets, pandas, scipy, torch, transformers, tyro" 2>/dev/null; then
        status=0
        for step in ${STEPS:-machine numbers ppo grpo}; do
            echo "== $step"
            timeout --kill-after=20s "${LIMIT:-9m}" "$python" benchmark/cost/gpu.py "$step" "$@"
            ended=$?
            [ $ended = 124 ] || [ $ended = 137 ] && echo "$step took more than ${LIMIT:-9m}"
            [ $ended = 0 ] || status=1
        done
        exit $status
    fi
done
echo "error: no Python with torch, transformers and the others; PYTHON=<interpreter> bash benchmark/gpu.sh" >&2
exit 2
