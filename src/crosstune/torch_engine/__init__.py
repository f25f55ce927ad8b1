"""The engine on torch and transformers: models, adapters, optimizers and quantization."""

import os

# Training on a CPU frees and allocates the same blocks in every step. torch's allocators return freed pages to the system
# unless these variables are set before the import, and each step waits for new pages: an eighth of a step on two Arm
# cores. mimalloc is in torch's Arm builds; the second variable makes large blocks huge pages.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
