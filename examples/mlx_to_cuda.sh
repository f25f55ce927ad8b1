#!/bin/sh
# Start a run on a Mac with MLX, and continue it on a CUDA machine with its optimizer state and data position.
#   sh examples/mlx_to_cuda.sh [options of `crosstune train`]
set -eu
data=$(dirname "$0")/chats.jsonl
to=${TO:-cuda}

crosstune train --backend "${BACKEND:-mlx}" --model_name "${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}" \
    --dataset "$data" --name moving --max_steps 20 "$@"
crosstune move runs/moving --to "$to"
echo "Copy runs/moving-*.crosstune.tar to the other machine and run there:"
echo "  crosstune train --resume moving-step*-$to.crosstune.tar --max_steps 40"
