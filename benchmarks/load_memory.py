"""Compare the peak memory of loading a 1.5B model into 4 bits on the CPU with its final size.

    python benchmarks/load_memory.py            every quantizer, each in a fresh process

The model is made on the spot with random weights (3 GB on disk, in a temporary folder that is removed).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB, KV_WIDTH = 1536, 8960, 28, 151936, 256
LAYER_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * INTERMEDIATE)


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, quantizer: str) -> None:
    import accelerate  # noqa: F401  (imported before the first reading, as their memory is not the model's)
    import psutil
    import torch
    import transformers  # noqa: F401

    from crosstune.config.load import make_config
    from crosstune.planner.gather import make_plan
    from crosstune.torch_engine.device import PRECISIONS
    from crosstune.torch_engine.loading.load import load_model

    asked = {"model_name": str(folder), "train_type": "qlora", "quantization_backend": quantizer}
    plan = make_plan(make_config(**asked, backend="cpu", precision="bf16"))
    process = psutil.Process()
    before = process.memory_info().rss
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model, _ = load_model(folder, plan=plan, precision=PRECISIONS["bf16"], device=torch.device("cpu"))
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    growth = peak[0] - before
    print(
        f"| {quantizer} | {size / 2**20:,.0f} | {LAYER_BYTES / 2**20:,.0f} | {growth / 2**20:,.0f} "
        f"| {(growth - LAYER_BYTES) / size:.2f} | {seconds:.0f} |",
        flush=True,
    )


def main() -> None:
    if len(sys.argv) == 3:
        measure(Path(sys.argv[1]), sys.argv[2])
        return
    print(
        "| quantizer | model MiB | one layer MiB | peak growth MiB | (peak - layer) / model | s |", flush=True
    )
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for quantizer in ("bnb", "hqq", "quanto"):
            subprocess.run([sys.executable, __file__, folder, quantizer], check=True)


if __name__ == "__main__":
    main()
