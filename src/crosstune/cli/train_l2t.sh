#!/usr/bin/env bash
# Train latent diffusion with crosstune. Set any variable from outside, as in
#   NNODES=1 NPROC_PER_NODE=2 L2T_BASE_STEPS=100 L2T_TRAIN_BS=4 bash scripts/training/train_qwen_english_l2t_stable.sh
set -euo pipefail

NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
NPROC_PER_NODE="${NPROC_PER_NODE:-1}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
WORLD=$((NNODES * NPROC_PER_NODE))
BASE_WORLD_SIZE="${BASE_WORLD_SIZE:-$WORLD}"

L2T_CONFIG="${L2T_CONFIG:-latentDLM_mmdit/configs/mmdit_stable.yaml}"
L2T_BASE_STEPS="${L2T_BASE_STEPS:-1000000}"
L2T_BASE_SAVE_FREQ="${L2T_BASE_SAVE_FREQ:-50000}"
L2T_BASE_LOG_FREQ="${L2T_BASE_LOG_FREQ:-10}"
L2T_BASE_EVAL_FREQ="${L2T_BASE_EVAL_FREQ:-10000}"

# Scale a number of steps for BASE_WORLD_SIZE devices to the devices in use.
scaled() { echo $((($1 * BASE_WORLD_SIZE + WORLD - 1) / WORLD)); }

FLAGS=(--recipe latent_diffusion --loss_type l2t --log_to stdout)
if [ -f "$L2T_CONFIG" ]; then FLAGS+=(--config "$L2T_CONFIG"); fi
FLAGS+=(--max_steps "$(scaled "$L2T_BASE_STEPS")")
FLAGS+=(--save_steps "$(scaled "$L2T_BASE_SAVE_FREQ")")
FLAGS+=(--log_every_n_steps "$(scaled "$L2T_BASE_LOG_FREQ")")
FLAGS+=(--eval_steps "$(scaled "$L2T_BASE_EVAL_FREQ")")
FLAGS+=(--batch_size "${L2T_TRAIN_BS:-4}")
FLAGS+=(--output_dir "${L2T_SAVE_DIR:-runs}")
FLAGS+=(--name "${L2T_RUN_NAME:-l2t-$(date +%Y%m%d-%H%M%S)}")
if [ -n "${GRAD_ACCUM_STEPS:-}" ]; then FLAGS+=(--gradient_accumulation_steps "$GRAD_ACCUM_STEPS"); fi
if [ -n "${LEARNING_RATE:-}" ]; then FLAGS+=(--lr "$LEARNING_RATE"); fi
if [ -n "${GRAD_CLIP_NORM:-}" ]; then FLAGS+=(--grad_norm "$GRAD_CLIP_NORM"); fi
if [ -n "${WARMUP_STEPS:-}" ]; then FLAGS+=(--warmup_steps "$WARMUP_STEPS"); fi
if [ -n "${LATENT_LOSS_WEIGHT:-}" ]; then FLAGS+=(--latent_loss_weight "$LATENT_LOSS_WEIGHT"); fi
if [ -n "${LATENT_DIM:-}" ]; then FLAGS+=(--latent_dim "$LATENT_DIM"); fi
if [ -n "${DTYPE:-}" ]; then FLAGS+=(--precision "$DTYPE"); fi
if [ -n "${DATA_WORKERS:-}" ]; then echo "DATA_WORKERS=$DATA_WORKERS: a thread prepares batches ahead; no workers are needed"; fi
if [ "${L2T_COMPILE:-0}" != 0 ]; then FLAGS+=(--torch_compile true); fi
if [ "$WORLD" -gt 1 ]; then FLAGS+=(--world_size "$WORLD"); fi

# Import the original token and latent files once; without them, use L2T_PAIRS or generated sentences.
PAIRS="${L2T_PAIRS:-}"
if [ -z "$PAIRS" ] && [ -n "${TOKEN_DIR:-}" ] && [ -n "${LATENT_DIR:-}" ]; then
  PAIRS="$(dirname "$TOKEN_DIR")/crosstune-pairs"
  if [ ! -f "$PAIRS/manifest.json" ]; then
    "${PYTHON:-python}" -m crosstune latents build "$(dirname "$TOKEN_DIR")" --out "$PAIRS" --max_tokens "${L2T_MAX_TOKENS:-512}" --too_long drop
  fi
fi
FLAGS+=(--dataset "${PAIRS:-grammar}")

if [ "$WORLD" -gt 1 ]; then # report a hung process after 30 minutes
  export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-1800}"
  export NCCL_TIMEOUT="${NCCL_TIMEOUT:-1800}"
fi
export NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT
mkdir -p train_logs
"${PYTHON:-python}" -m crosstune train "${FLAGS[@]}" "$@" 2>&1 | tee "train_logs/train_$(date +%Y%m%d_%H%M%S)_node$NODE_RANK.log"
