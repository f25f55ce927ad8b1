"""Train a scalar head with torch: a reward model, in transformers' form of a sequence classifier with one label."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForSequenceClassification

from crosstune.core.adapter_init import uniform_by_name
from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.data.tokenizer import Tokenizer
from crosstune.models.folder_record import RECORD
from crosstune.models.identity import identity
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.torch_engine import export
from crosstune.torch_engine.adapters import AdaptedLinear
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.load import load_model, read_config, readable_errors
from crosstune.torch_engine.stream import find_tensors
from crosstune.torch_engine.task import BuildContext, MetricSums, Tensors

HEAD = "score"
"""The name of transformers' head of a sequence classifier."""


class Head(nn.Module):
    """A linear layer with one output. It is no nn.Linear, so that it gets no adapter: it is trained whole."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float())


class ScalarHead:
    """A sequence classifier with one output: the score as a fraction of the scale, read after the prompt."""

    metric_names: Sequence[str] = ("absolute_error",)
    head_names: Sequence[str] = (f"{HEAD}.weight",)

    def __init__(self) -> None:
        self.opening: BuildContext | None = None

    def build(self, opening: BuildContext) -> nn.Module:
        """Put the body of a language model under a new head, or load a folder that has a head already."""
        folder = opening.folder
        assert folder is not None, "a scalar head is put on a base model"
        self.opening = opening
        if self.head_names[0] in find_tensors(folder):
            return _read_trained(folder, opening)
        config = read_config(folder)
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UserError(
                f"--head scalar does not work with a model of the type '{config.model_type}'.",
                why="transformers has no sequence classifier of this type.",
                do="use --head tokens",
            )
        source = load_model(folder, plan=opening.plan, precision=opening.precision, device=opening.device)[0]
        config.num_labels, config.problem_type = 1, "regression"
        config.pad_token_id = Tokenizer.from_folder(folder).pad_id
        with torch.device("meta"):
            model: Any = AutoModelForSequenceClassification.from_config(config)
        setattr(model, model.base_model_prefix, getattr(source, source.base_model_prefix))
        width = model.get_submodule(HEAD).weight.shape[1]
        start = uniform_by_name(HEAD, shape=(1, width), seed=opening.plan.config.seed)
        _set_head(model, torch.from_numpy(start).to(opening.device))
        trained: nn.Module = model
        return trained

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:
        width = int(batch.ends.max()) + 1
        return {
            "input_ids": batch.input_ids[:, :width].astype("int64"),
            "ends": batch.ends.astype("int64"),
            "scores": batch.scores,
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the squared error, summed over the rows of a batch."""
        error = pooled_scores(model, tensors["input_ids"], tensors["ends"]) - tensors["scores"]
        return (error**2).sum(), {"absolute_error": (error.abs().sum(), len(error))}

    def base_record(self) -> dict[str, Any]:
        opening = self._opened()
        assert opening.folder is not None
        return {
            "base": {"name": opening.plan.config.model_name, "identity": identity(opening.folder)},
            "quantization": None,
            "precision": opening.plan.precision,
        }

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write a folder that AutoModelForSequenceClassification loads, with adapters merged."""
        base = self._opened().folder
        assert base is not None
        adapters = {
            name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)
        }
        # By the config: FSDP2 gives a sharded model a class of its own.
        kind = AutoModelForSequenceClassification._model_mapping[type(model.config)]
        model.config.architectures = [kind.__name__]
        export.save_model(folder, model.config, export.merged_tensors(model, adapters), base=base)
        write_json(folder / RECORD, self.base_record())

    def _opened(self) -> BuildContext:
        assert self.opening is not None, "the model is not built yet"
        return self.opening


def pooled_scores(model: Any, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the head's output after the token `ends` of each row, in fp32. Rows are padded on the right."""
    scores: torch.Tensor = model(ids, ends)
    return scores


def _forward(model: Any, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    hidden = getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(ids), device=ids.device), ends]
    scores: torch.Tensor = model.get_submodule(HEAD)(last)[:, 0]
    return scores


def scalar_scores(session: Any, prompts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the score of each prompt as a fraction of the scale."""
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    for number, prompt in enumerate(prompts):
        ids[number, : len(prompt)] = prompt
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=session.device)
    with (
        evaluating(session.model),
        memory_errors(session.device, doing=EVALUATING),
        torch.inference_mode(),
        session.precision.context(session.device),
    ):
        found = pooled_scores(session.model, torch.from_numpy(ids).to(session.device), ends)
    values: NDArray[np.float64] = found.double().cpu().numpy()
    return values


def _read_trained(folder: Path, opening: BuildContext) -> nn.Module:
    with readable_errors(folder):
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=opening.precision.weights, trust_remote_code=False, local_files_only=True
        ).to(opening.device)
    _set_head(model, model.get_submodule(HEAD).weight.detach())
    trained: nn.Module = model
    return trained


def _set_head(model: Any, weight: torch.Tensor) -> None:
    """Give a sequence classifier our head. The scores come from its own forward pass, for which FSDP2 gathers weights."""
    setattr(model, HEAD, Head(weight))
    model.forward = functools.partial(_forward, model)
