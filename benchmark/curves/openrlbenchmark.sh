#!/usr/bin/env bash
# openrlbenchmark draws our runs on Weights & Biases next to published ones:
#
#     bash benchmark/curves/openrlbenchmark.sh chapter1 <entity>         # OpenAI's, with the command of lm-human-preference-details
#     bash benchmark/curves/openrlbenchmark.sh chapter2 <entity>         # TRL's PPO on TL;DR, with TRL's command (at f2cd577)
#     bash benchmark/curves/openrlbenchmark.sh chapter3 <entity> gsm8k   # ours alone, of this preset
#
# With `local` in place of an entity, replay.py draws chapters 2 and 3 without a network, from the folders RUNS (default:
# runs/tldr_policy* or runs/rlvr_policy*); a preset may follow in chapter 2, too. METRICS="objective/kl loss/value_avg" adds
# metrics to chapter 3, where its runs have them.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
tool="$python -m openrlbenchmark.rlops_multi_metrics"

filter() { # entity, project, x axis, key of the task, key of the experiment, metrics
    local start="?we=$1&wpn=$2&xaxis=$3&ceik=$4&cen=$5"
    shift 5
    printf %s "$start"
    printf '&metrics=%s' "$@"
}

case "${1:-} ${2:-}" in
"chapter1 "?*)
    theirs=(
        objective/score objective/kl objective/entropy objective/score_total objective/kl_coef
        ppo/loss/total ppo/loss/value ppo/loss/policy
        ppo/policy/clipfrac ppo/policy/entropy ppo/returns/mean ppo/policy/approxkl
        ppo/val/clipfrac ppo/val/error ppo/val/mean ppo/returns/var ppo/val/vpred
    )
    ours=(
        objective/scores objective/kl objective/entropy objective/score_total objective/kl_coef
        ppo/loss/total ppo/loss/value ppo/loss/policy_avg
        ppo/policy/clipfrac_avg ppo/policy/entropy_avg ppo/returns/mean ppo/policy/approxkl_avg
        ppo/val/clipfrac_avg ppo/val/error ppo/val/mean ppo/returns/var ppo/val/vpred
    )
    model=task.value.policy.initial_model
    exec $tool \
        --filters "$(filter openrlbenchmark lm-human-preferences _step task_id $model "${theirs[@]/#/ppo/}")" 124M \
        --filters "$(filter "$2" ppo_rlhf _step rewards.value.label_dataset exp_name "${ours[@]}")" 'train_policy?cl=ppo_rlhf' \
        --env-ids sentiment descriptiveness \
        --env-ids sentiment/offline_5k.json descriptiveness/offline_5k.json \
        --no-check-empty-runs --pc.ncols 6 --pc.ncols-legend 1 --output-filename compare --scan-history
    ;;
"chapter2 "?*)
    metrics=(
        objective/rlhf_reward objective/scores objective/kl objective/non_score_reward objective/entropy
        policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg
        val/ratio val/ratio_var val/num_eos_tokens lr eps
    )
    ours=(--filters "$(filter "$2" ppo_rlhf episode preset exp_name "${metrics[@]}")" 'tldr_policy?cl=ppo_rlhf')
    if [ "$2" = local ]; then
        exec $python benchmark/curves/replay.py --runs "${RUNS:-runs/tldr_policy*}" -- "${ours[@]}" --env-ids "${3:-tldr}"
    fi
    their_runs='cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr?tag=pr-1540&cl=TRL'
    exec $tool \
        --filters "$(filter huggingface trl train/episode output_dir sft_model_path "${metrics[@]/#/train/}")" "$their_runs" \
        "${ours[@]}" --env-ids models/minimal/ppo_tldr --env-ids tldr --no-check-empty-runs \
        --pc.ncols 4 --pc.ncols-legend 1 --pc.xlabel Episode --output-filename compare --scan-history
    ;;
"chapter3 "?*)
    metrics=(
        objective/rlhf_reward objective/scores objective/entropy policy/approxkl_avg policy/clipfrac_avg loss/policy_avg
        policy/entropy_avg val/ratio val/ratio_var val/num_stop_token_ids lr eps ${METRICS:-}
    )
    ours=(--filters "$(filter "$2" ppo_rlhf episode preset exp_name "${metrics[@]}")" 'rlvr_policy?cl=ppo_rlhf' --env-ids "$3")
    if [ "$2" = local ]; then
        exec $python benchmark/curves/replay.py --runs "${RUNS:-runs/rlvr_policy*}" -- "${ours[@]}"
    fi
    exec $tool "${ours[@]}" --no-check-empty-runs --pc.ncols 4 --pc.xlabel Episode --output-filename compare --scan-history
    ;;
*)
    sed -n '2,/^set/{/^#/p}' "$0" >&2
    exit 2
    ;;
esac
