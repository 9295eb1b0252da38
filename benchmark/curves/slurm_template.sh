#!/bin/bash
# Ten seeds as a job array, four at a time: sbatch benchmark/curves/slurm_template.sh. Adapt it to your cluster; not run
# here. Two minutes before the time is up, SIGTERM lets a run write a checkpoint; submit the array again, and it resumes.
#SBATCH --job-name=sentiment
#SBATCH --array=1-10%4
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
exec .venv/bin/python benchmark/curves/many_seeds.py --name sentiment --num_seeds 1 --start_seed "$SLURM_ARRAY_TASK_ID" \
    --command "accelerate launch --num_processes 8 ppo_rlhf/train_both.py"
