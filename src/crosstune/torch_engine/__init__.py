"""The engine on torch and transformers: models, adapters, optimizers and quantization."""

import os

# Training on a CPU frees and takes the same blocks in every step. torch's allocators give freed pages back to the system
# unless they are told before torch is imported, and then each step waits for the system to clear the pages again: on two
# Arm cores that was an eighth of a step. mimalloc is in torch's Arm builds; the second makes large blocks huge pages.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
