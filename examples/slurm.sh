#!/bin/sh
# Submit a run on two nodes with eight GPUs each. SLURM requeues it after a preemption or the time limit, and it resumes.
#   sh examples/slurm.sh --print                    # show the batch script, submit nothing
#   sh examples/slurm.sh --partition gpu --account my-team
set -eu
data=$(dirname "$0")/chats.jsonl

crosstune launch --on slurm --nnodes 2 --gpus 8 --cpus 64 --time 12:00:00 "$@" \
    --name two-nodes --model_name "${MODEL:-meta-llama/Llama-3.1-8B}" --dataset "$data" \
    --train_type full --sharding_strategy full_shard --precision bf16 --save_minutes 15
