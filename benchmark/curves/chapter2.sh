#!/usr/bin/env bash
# The canonical commands of chapter 2 (TL;DR summarisation), one experiment for each word:
#
#     WORKERS=2 bash benchmark/curves/chapter2.sh posts
#
#     1b                            Pythia, deduped: SFT, reward model and PPO, four seeds on eight GPUs of 80 GB
#     1b-lora                       the same with adapters of rank 64 on the policy, on one GPU
#     1b-subtract 1b-k3             the penalty subtracted; the k3 estimator of the KL divergence
#     posts                         the small world, four seeds on a CPU
#
# WORKERS (default 1): how many seeds run at once. SHOW=1: print the table of progress and run nothing. Give a line
# again to go on after an interruption.
set -euo pipefail
if [ $# = 0 ]; then
    sed -n '2,/^set/{/^#/p}' "$0" >&2
    exit 2
fi
cd "$(dirname "$0")/../.."

seeds() { # name, first seed, distance of the seeds, command
    "${PYTHON:-python}" benchmark/curves/many_seeds.py --name "$1" --start_seed "$2" --seed_step "$3" --num_seeds 4 \
        --command "$4" --workers "${WORKERS:-1}" ${SHOW:+--show}
}
of_the_paper() { seeds "tldr-$1" 44413 11100 "$2"; } # 44413, 55513, 66613, 77713

ddp="accelerate launch --num_processes 8"
all=ppo_rlhf/tldr/all.py
track="--sft.track --reward.track --policy.track"
bf16="--sft.dtype bfloat16 --reward.dtype bfloat16 --policy.dtype bfloat16"

pieces() { # of one process: posts per pass of SFT, comparisons, episodes, episodes of a rollout
    echo "--sft.local_micro_batch_size $1 --reward.local_micro_batch_size $2 --reward.local_rollout_batch_size $2" \
        "--policy.ppo.local_micro_batch_size $3 --policy.ppo.local_rollout_batch_size $4"
}

for experiment in "$@"; do
    case "$experiment" in
    1b)
        of_the_paper 1b "$ddp $all --base_model EleutherAI/pythia-1b-deduped $bf16 $track $(pieces 8 8 16 64)" ;;
    1b-lora)
        adapters="--policy.lora.rank 64 --policy.lora.alpha 128 --policy.lora.target_modules all-linear"
        one="accelerate launch --num_processes 1 $all --base_model EleutherAI/pythia-1b-deduped"
        of_the_paper 1b-lora "$one $bf16 $track $adapters --policy.ppo.lr 1e-5 $(pieces 8 8 8 64)" ;;
    1b-subtract | 1b-k3)
        case "$experiment" in
        1b-subtract) change="--policy.rewards.missing_eos subtract" ;;
        1b-k3) change="--policy.rewards.kl_estimator k3" ;;
        esac
        base="--base_model EleutherAI/pythia-1b-deduped"
        of_the_paper "$experiment" "$ddp $all $base $bf16 $track $(pieces 8 8 16 64) $change" ;;
    posts)
        seeds posts 1 1 "python $all --preset posts" ;;
    *)
        echo "error: $0 has no experiment $experiment" >&2
        exit 2 ;;
    esac
done
