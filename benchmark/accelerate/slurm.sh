#!/bin/bash
# Several nodes through Slurm: sbatch benchmark/accelerate/slurm.sh models/<run>/reward. Not run here.
#SBATCH --job-name=ppo_rlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@120
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=$((SLURM_NNODES * 8))
export first processes
# shellcheck disable=SC2016  # $SLURM_NODEID is each node's own
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'exec .venv/bin/accelerate launch \
    --config_file benchmark/accelerate/nodes.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$processes" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$first" \
    ppo_rlhf/train_policy.py --rewards.trained_model "$1" \
    --ppo.whiten_groups "$processes" --ppo.batch_size "$((processes * 64))"' bash "$1"
