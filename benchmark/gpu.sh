#!/usr/bin/env bash
# The first hour on a GPU: bash benchmark/gpu.sh [arguments of benchmark/cost/gpu.py]
# PYTHON names an interpreter that has the packages, unless the active one or .venv has them.
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for python in ${PYTHON:-python .venv/bin/python python3}; do
    if "$python" -c "import accelerate, datasets, pandas, scipy, torch, transformers, tyro" 2>/dev/null; then
        exec "$python" benchmark/cost/gpu.py "$@"
    fi
done
echo "error: no Python with torch, transformers and the others; PYTHON=<interpreter> bash benchmark/gpu.sh" >&2
exit 2
