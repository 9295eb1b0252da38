#!/bin/bash
#SBATCH --job-name={{name}}
#SBATCH --array={{array}}
#SBATCH --output="{{folder}}/slurm-%A-%a.out"
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
# Filled in by many_seeds.py --slurm_template. Adapt the lines above to your cluster. Each task of the array runs one
# seed. Two minutes before the time is up, SIGTERM lets it write a checkpoint; submit once more, and it goes on.
cd {{here}}
exec {{command}}
