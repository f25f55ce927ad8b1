"""Intact files of every format that crosstune reads, made once for the cases of hostile_files.py."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from crosstune.cli.main import main
from crosstune.models.adapter_choice import AdapterSettings, Targets
from crosstune.models.adapter_files import save_adapter
from crosstune.models.tiny import tiny_model

FIXED = ("--backend", "cpu", "--precision", "fp32", "--eval_samples", "2")
ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}]}
    for n in range(8)
]


class Workshop:
    """The intact files, below `good`, and copies of them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.good = home / "good"
        if not self.good.exists():
            self._make()

    def _make(self) -> None:
        self.good.mkdir(parents=True)
        tiny = tiny_model(
            self.good / "model",
            vocab=300,
            hidden=16,
            intermediate=32,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
        )
        weights = sorted(path.name for path in tiny.glob("*.safetensors"))
        index = {"metadata": {}, "weight_map": {"model.norm.weight": weights[0]}}
        (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
        (tiny / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        data = self.good / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self._make_adapter(tiny)
        files = ["--model_name", str(tiny), "--dataset", str(data), "--output_dir", str(self.good)]
        amount = "--name run --max_steps 2 --save_steps 1 --train_type lora --lora_rank 2"
        assert main(["train", *FIXED, *files, *amount.split()]) == 0
        run, archive = self.good / "run", self.good / "run.crosstune.tar"
        assert main(["move", str(run), "--to", "cpu", "--out", str(archive)]) == 0
        gguf = ["--to", "gguf", "--gguf_type", "f16", "--out", str(self.good / "gguf"), "--backend", "cpu"]
        assert main(["export", str(tiny), *gguf]) == 0
        next((self.good / "gguf").glob("*.gguf")).rename(self.good / "model.gguf")

    def _make_adapter(self, base: Path) -> None:
        layers = {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.self_attn.v_proj": (8, 16)}
        tensors = {}
        for layer, (rows, columns) in layers.items():
            tensors[f"{layer}.lora_A.weight"] = np.full((2, columns), 0.01, np.float32)
            tensors[f"{layer}.lora_B.weight"] = np.full((rows, 2), 0.01, np.float32)
        settings = AdapterSettings(rank=2, alpha=4.0, dropout=0.0, rank_stabilized=False, magnitudes=False)
        record = {"base": {"name": str(base), "identity": {}}, "quantization": None, "precision": "fp32"}
        save_adapter(
            self.good / "adapter",
            tensors,
            settings=settings,
            targets=Targets(modules=["q_proj", "v_proj"]),
            base=base,
            record=record,
        )

    def import_libraries(self) -> None:
        """Run one intact command of each engine, since the first import of a library takes longer than a case may."""
        words = ["--prompt", "Hi", "--max_new_tokens", "1", "--backend", "cpu"]
        assert main(["generate", str(self.good / "adapter"), *words]) == 0

    def copy(self, name: str, work: Path) -> Path:
        """Copy a folder; its files are damaged by replacing them, never in place."""
        return self.link(self.good / name, work / name)

    def link(self, folder: Path, target: Path) -> Path:
        """Copy a folder by hard links; logs, which a command appends to, are copied."""

        def copy(source: str, place: str) -> None:
            (shutil.copy2 if source.endswith((".jsonl", ".log")) else os.link)(source, place)

        return Path(shutil.copytree(folder, target, copy_function=copy, symlinks=True))

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a folder below `good`, which is made when it is first needed."""
        folder = self.good / name
        if not folder.exists():
            make(folder)
        return folder
