#!/usr/bin/env bash
# The canonical commands of chapter 1 (Ziegler et al. 2019) and of what came after it, one experiment for each word:
#
#     WORKERS=2 bash benchmark/curves/chapter1.sh tales tales-descriptiveness
#
#     sentiment descriptiveness                   OpenAI's tasks, GPT-2 124M, ten seeds on eight GPUs
#     sentiment-1gpu descriptiveness-1gpu         the same on one GPU
#     tales tales-descriptiveness                 the small world, ten seeds on a CPU
#     overoptimisation-320 -640 -4992             the small world, that many labels and no controller, four seeds
#     gradient-accumulation                       what lm-human-preference-details varied, on eight GPUs
#     gpt2-medium gpt2-large gpt2-xl              other base models, on eight GPUs
#     cerebras-111m                               the same; MODEL says where cerebras/Cerebras-GPT-111M lies with
#                                                 safetensors, which its main branch lacks: a folder, or name@revision
#
# WORKERS (default 1): how many seeds run at once. SHOW=1: print the table of progress and run nothing. Give a line
# again to go on after an interruption.
set -euo pipefail
if [ $# = 0 ]; then
    sed -n '2,/^set/{/^#/p}' "$0" >&2
    exit 2
fi
cd "$(dirname "$0")/../.."

seeds() { # name, number of seeds, command
    "${PYTHON:-python}" benchmark/curves/many_seeds.py --name "$1" --num_seeds "$2" --command "$3" \
        --workers "${WORKERS:-1}" ${SHOW:+--show}
}

eight="accelerate launch --num_processes 8"
one="accelerate launch --num_processes 1"
both=ppo_rlhf/train_both.py
track="--reward.track --policy.track"

for experiment in "$@"; do
    case "$experiment" in
    # OpenAI's tasks, GPT-2 124M. On one GPU the same algorithm, in smaller pieces.
    sentiment | descriptiveness)
        seeds "$experiment" 10 "$eight $both --preset $experiment $track" ;;
    sentiment-1gpu | descriptiveness-1gpu)
        pieces="--policy.ppo.local_micro_batch_size 64 --policy.ppo.local_rollout_batch_size 128"
        pieces+=" --reward.local_rollout_batch_size 128"
        seeds "$experiment" 10 "$one $both --preset ${experiment%-1gpu} $track $pieces" ;;

    # The small world, on a CPU, without a network.
    tales | tales-descriptiveness)
        seeds "$experiment" 10 "python $both --preset $experiment" ;;
    overoptimisation-320 | overoptimisation-640 | overoptimisation-4992) # labels; controller off, small coefficient
        labels="--reward.num_train ${experiment#*-}"
        if [ "$experiment" != overoptimisation-4992 ]; then labels+=" --reward.batch_size 4"; fi
        free="--policy.rewards.adaptive_kl.target None --policy.rewards.kl_coef 0.001"
        seeds "$experiment" 4 "python $both --preset tales $labels $free --policy.ppo.total_episodes 9600" ;;

    # An ablation of lm-human-preference-details, on its task. Pythia is missing: the labels are token ids of GPT-2,
    # and train_reward.py refuses to read them with another tokenizer.
    gradient-accumulation) # 64 pieces of one episode; here a memory knob, so nothing may happen
        pieces="--policy.ppo.local_micro_batch_size 1 --reward.local_micro_batch_size 1"
        seeds "$experiment" 5 "$eight $both --preset descriptiveness $track $pieces" ;;
    # Their falcon-rw-1b is missing too: it has no position embeddings but ALiBi, which check_model refuses.
    gpt2-medium | gpt2-large | gpt2-xl | cerebras-111m)
        model=$experiment
        if [ "$experiment" = cerebras-111m ]; then model=${MODEL:?must name a model with safetensors}; fi
        pieces="--policy.ppo.local_micro_batch_size 16 --reward.local_rollout_batch_size 16"
        seeds "$experiment" 5 "$eight $both --preset descriptiveness --base_model $model $track $pieces" ;;
    *)
        echo "error: $0 has no experiment $experiment" >&2
        exit 2 ;;
    esac
done
