#!/bin/sh
# Train a latent-diffusion model on generated sentences, and decode a sentence from its vector.
#   sh examples/latent_diffusion.sh [options of `crosstune train`]
set -eu

crosstune latents build grammar --out pairs --max_texts 2000 --max_tokens 16
crosstune train --recipe latent_diffusion --dataset pairs --name latent --hidden_size 128 --n_blocks 3 \
    --lr 2e-3 --ema_decay 0.99 --max_steps 1500 "$@"
crosstune latents decode runs/latent --text "the tiny cat sees a red ball in the garden"
