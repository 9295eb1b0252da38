#!/bin/bash
#SBATCH --job-name=rlvr_async
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
# Not run. The learner on the first node, eight workers on the second: see README.md. Arguments are rlvr/asynchronous.py's.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
learner=${nodes[0]} samplers=${nodes[1]} port=6379
address=$(srun --nodes=1 --ntasks=1 -w "$learner" hostname --ip-address | cut -d' ' -f1)

srun --overlap --nodes=1 --ntasks=1 -w "$learner" \
    ray start --head --node-ip-address="$address" --port=$port --num-gpus=0 --num-cpus=0 --include-dashboard=false --block &
sleep 20
srun --overlap --nodes=1 --ntasks=1 -w "$samplers" \
    ray start --address="$address:$port" --num-gpus=8 --num-cpus=16 --block &
sleep 20

srun --overlap --nodes=1 --ntasks=1 -w "$learner" \
    torchrun --nproc_per_node 8 ppo_rlhf/rlvr/asynchronous.py --ray_address "$address:$port" --workers 8 \
    --ppo.local_micro_batch_size 8 --ppo.local_rollout_batch_size 20 "$@" &
trap 'kill -TERM $!' TERM
wait $! || wait $!
