#!/bin/sh
# Train with two processes: one per GPU, or two on a CPU. The losses equal a run with one process.
#   BACKEND=cuda MODEL=ORG/MODEL sh examples/two_processes.sh [options of `crosstune train`]
# `torchrun --nproc_per_node 2 -m crosstune train ...` starts the same run.
set -eu
data=$(dirname "$0")/chats.jsonl

crosstune train --backend "${BACKEND:-cpu}" --world_size 2 --sharding_strategy full_shard \
    --model_name "${MODEL:-smollm2-135m}" --dataset "$data" --name two --max_steps 20 --save_steps 10 "$@"
