#!/usr/bin/env bash
# The canonical commands of chapter 1, one experiment for each word given:
#
#     bash benchmark/chapter1.sh tales tales-descriptiveness
#
# WORKERS (default 1) seeds run at once. Give the line again to go on after an interruption.
set -euo pipefail
cd "$(dirname "$0")/.."
WORKERS=${WORKERS:-1}

seeds() { # name, number of seeds, command
    "${PYTHON:-.venv/bin/python}" benchmark/benchmark.py --name "$1" --num_seeds "$2" --workers "$WORKERS" --command "$3"
}

for experiment in "$@"; do
    case "$experiment" in
        # A CPU, no network.
        tales | tales-descriptiveness)
            seeds "$experiment" 10 "python ppo_rlhf/train_both.py --preset $experiment" ;;
        *)
            echo "error: $experiment is none of the experiments in $0" >&2
            exit 2 ;;
    esac
done
