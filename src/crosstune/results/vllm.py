"""Describe how vLLM serves a target: the words of its command line for an adapter, and the reasons to merge it first."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.models.quantized_folder import read_quantization
from crosstune.runs.trained_folder import Trained

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank."""


def why_merged(trained: Trained) -> str:
    """Return why vLLM cannot apply the target's adapter, empty if it can."""
    rank = int(trained.settings["r"])
    above = f"its rank {rank} exceeds vLLM's limit of {_RANKS[-1]}" if rank > _RANKS[-1] else ""
    return trained.why_merged or above


def adapter_words(name: str, adapter: Path, *, rank: int) -> list[str]:
    """Return the options that apply an adapter under a name."""
    module = f"{name}={adapter}"
    if module.count("=") > 1 or "," in module:  # vLLM would split it elsewhere
        module = json.dumps({"name": name, "path": str(adapter)})
    limit = next(each for each in _RANKS if each >= rank)
    return ["--enable-lora", "--max-lora-rank", str(limit), "--lora-modules", module]


def vllm_report(trained: Trained, folder: Path) -> dict[str, Any]:
    """Return the command that serves the target, with warnings; raise a UserError with the reason why vLLM rejects it."""
    why = "" if trained.adapter is None else why_merged(trained)
    if read_quantization(folder) is not None:
        why = why or f"vLLM does not read the quantized weights in {folder}"
    if why:
        raise UserError(
            f"vLLM cannot serve {trained.home or trained.base} as it is.",
            why=f"{why}.",
            do=f"export it, then serve that folder: crosstune export {shlex.quote(str(trained.home or trained.base))} --to hf",
        )
    command = ["vllm", "serve", str(folder)]
    if trained.adapter is None:
        return {"command": command}
    name = trained.home.name if trained.home is not None else "adapter"
    command += adapter_words(name, trained.adapter, rank=int(trained.settings["r"]))
    if (tokenizer := trained.tokenizer_folder(folder)) != folder:
        command += ["--tokenizer", str(tokenizer)]
    warnings = []
    if trained.quantization is not None:
        warnings.append(
            f"the adapter was trained on a base quantized to {trained.quantization.bits} bits; vLLM applies it to the "
            "original weights, and its answers differ"
        )
    return {"command": command, "warnings": warnings}
