"""Choose an engine server (vLLM, mlx-lm, llama.cpp, transformers) and write its command line."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.machines.probe import probe_machine
from crosstune.results.vllm import adapter_words, why_merged
from crosstune.runs.trained_folder import Trained
from crosstune.serve.router import LOOPBACK

_GPU_SHARE = 0.9
"""The fraction of a GPU's memory for all vLLM servers together."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The files of a model, ready for an engine."""

    name: str
    path: Path
    """A model folder, or a GGUF file for llama.cpp."""
    context: int | None
    """The longest context of the model, if known."""
    adapter: Path | None = None
    """An adapter on top of `path`; only for vLLM."""
    rank: int = 0
    tokenizer: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A model for an engine server, and the settings of the server."""

    model: Prepared
    port: int
    api_key: str
    num_slots: int
    context_length: int
    num_threads: int
    num_models: int = 1


@dataclass(frozen=True, kw_only=True)
class Command:
    """The request to the child process: a Python module with its arguments, or None for llama.cpp in the child itself."""

    module: str | None
    words: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    """The server's own name for the model."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    title: str
    packages: tuple[str, ...]
    install: str
    form: str
    """The format of `crosstune export` that it reads."""
    command: Callable[[Launch], Command]


def _vllm(launch: Launch) -> Command:
    model = launch.model
    name = model.name if model.adapter is None else f"{model.name}-base"
    words = ["serve", str(model.path), "--served-model-name", name]
    if model.adapter is not None:
        words += adapter_words(model.name, model.adapter, rank=model.rank)
    if model.tokenizer is not None:
        words += ["--tokenizer", str(model.tokenizer)]
    words += ["--host", LOOPBACK, "--port", str(launch.port), "--max-model-len", str(launch.context_length)]
    words += ["--gpu-memory-utilization", f"{_GPU_SHARE / launch.num_models:.2f}"]
    words += ["--uvicorn-log-level", "warning"]
    return Command(
        module="vllm.entrypoints.cli.main",
        words=words,
        environment={"VLLM_API_KEY": launch.api_key},  # a command line is visible to other users
        model=model.name,
    )


def _mlx(launch: Launch) -> Command:
    words = ["--model", str(launch.model.path), "--host", LOOPBACK, "--port", str(launch.port)]
    words += ["--log-level", "WARNING", "--decode-concurrency", str(launch.num_slots)]
    return Command(module="mlx_lm.server", words=words, model="default_model")


def _transformers(launch: Launch) -> Command:
    words = ["serve", str(launch.model.path), "--host", LOOPBACK, "--port", str(launch.port)]
    return Command(module="transformers.cli.transformers", words=words, model=str(launch.model.path))


def _llamacpp(launch: Launch) -> Command:
    names = ("port", "api_key", "num_slots", "context_length", "num_threads")
    settings = {name: getattr(launch, name) for name in names}
    settings |= {"path": str(launch.model.path), "name": launch.model.name}
    return Command(module=None, settings=settings, model=launch.model.name)


ENGINES = {
    "vllm": Engine(title="vLLM", packages=("vllm",), install="pip install vllm", form="hf", command=_vllm),
    "mlx": Engine(
        title="mlx-lm",
        packages=("mlx_lm",),
        install="pip install 'crosstune[mlx]'",
        form="mlx",
        command=_mlx,
    ),
    "llamacpp": Engine(
        title="llama.cpp",
        packages=("xllamacpp",),
        install="pip install 'crosstune[llamacpp]'",
        form="gguf",
        command=_llamacpp,
    ),
    "transformers": Engine(
        title="transformers serve",
        packages=("transformers.cli.serving", "fastapi", "uvicorn"),
        install="pip install 'transformers[serving]'",
        form="hf",
        command=_transformers,
    ),
}


def choose_engine(asked: str, targets: Sequence[str]) -> str:
    """Return the name of the engine for --engine: vLLM on an NVIDIA GPU, mlx-lm on a Mac, llama.cpp elsewhere."""
    has_gguf = any(is_gguf(target) for target in targets)
    if asked == "auto":
        if not has_gguf and is_installed("vllm") and probe_machine(backends=["cuda"]).available():
            asked = "vllm"
        elif (
            not has_gguf and is_installed("mlx") and (sys.platform, platform.machine()) == ("darwin", "arm64")
        ):
            asked = "mlx"
        else:
            asked = "llamacpp"
    engine = ENGINES[asked]
    if has_gguf and engine.form != "gguf":
        raise UserError(
            f"--engine {asked} does not serve a GGUF file.",
            do="remove --engine: llama.cpp serves it; or pass the run or the model instead of the file",
        )
    if not is_installed(asked):
        others = [name for name in ENGINES if is_installed(name)]
        also = f", or use --engine {' or '.join(others)}" if others and not has_gguf else ""
        raise UserError(
            f"{engine.title} is not installed, so it cannot serve the model.",
            why=f"the Python package {_missing(asked)[0]} is missing.",
            do=f"{engine.install}{also}",
        )
    return asked


def is_installed(name: str) -> bool:
    return not _missing(name)


def _missing(name: str) -> list[str]:
    return [package for package in ENGINES[name].packages if not _is_found(package)]


def _is_found(package: str) -> bool:
    find = importlib.util.find_spec
    return find(package.partition(".")[0]) is not None and find(package) is not None


def is_gguf(target: str) -> bool:
    return target.lower().endswith(".gguf")


def takes_adapter(name: str, trained: Trained) -> bool:
    """Return True if the engine applies the adapter itself: vLLM, for plain LoRA on a base that is not quantized."""
    if name != "vllm" or trained.adapter is None:
        return False
    return trained.quantization is None and not why_merged(trained)
