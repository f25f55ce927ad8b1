"""Options for the model to train."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import ADAPTERS, LLAMA_PRO, MLX_ENGINE
from crosstune.config.option import Holds, OnResume, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model_name: str = option(
        "smollm2-135m",
        "Model to train: a bundled name, a folder, a .gguf file, or a hub id",
        aliases=("model",),
        holds=Holds.PATH,
    )
    base_adapter: str | None = option(
        None, "Adapter folder to start from", needs=(ADAPTERS,), holds=Holds.PATH
    )
    tokenizer: str | None = option(
        None,
        "Folder with tokenizer files to use instead of the model's own",
        holds=Holds.PATH,
        on_resume=OnResume.DIVIDES_DATA,
    )
    llama_pro_path: str | None = option(
        None,
        "Folder of a block-expanded model for llama_pro, named ..._blk_exp-OLD-NEW; used instead of model_name",
        needs=(LLAMA_PRO,),
        holds=Holds.PATH,
    )
    mlx_config: str | None = option(
        None, "JSON or YAML file with settings for the MLX engine", needs=(MLX_ENGINE,), holds=Holds.PATH
    )
