"""Train a scalar head with torch: a reward model, in transformers' form of a sequence classifier with one label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from crosstune.core.adapter_init import uniform_by_name
from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.models.folder_record import RECORD
from crosstune.models.identity import identity
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.torch_engine import export
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.load import empty_model, load_model, read_config
from crosstune.torch_engine.task import MetricSums, Opening, Tensors

HEAD = "score"
"""The name of transformers' head of a sequence classifier."""


class ScalarHead:
    """A sequence classifier with one output: the score as a fraction of the scale, read after the prompt."""

    metric_names: Sequence[str] = ("absolute_error",)
    trained_besides_adapters = (f"{HEAD}.weight",)
    """The head is trained whole, also where the rest of the model has adapters."""
    peft_task = "SEQ_CLS"

    def __init__(self, *, pad_id: int) -> None:
        self.pad_id = pad_id
        self.opening: Opening | None = None

    def build(self, opening: Opening) -> nn.Module:
        """Put the body of the language model under a new head."""
        from transformers import AutoModelForSequenceClassification

        assert opening.folder is not None, "a scalar head is put on a base model"
        self.opening = opening
        saved = read_saved_head(opening.folder)
        source = load_model(
            opening.folder, plan=opening.plan, precision=opening.precision, device=opening.device
        )[0]
        config = read_config(opening.folder)
        config.num_labels, config.pad_token_id, config.problem_type = 1, self.pad_id, "regression"
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UserError(
                f"--head scalar does not work with a model of the type '{config.model_type}'.",
                why="transformers has no sequence classifier of this type.",
                do="use --head tokens",
            )
        model = empty_model(opening.folder, config, kind=AutoModelForSequenceClassification)
        body = source.base_model_prefix
        setattr(model, body, getattr(source, body))
        width = model.get_submodule(HEAD).weight.shape[1]
        start = saved if saved is not None else uniform_by_name(HEAD, shape=(1, width), seed=opening.plan.config.seed)
        head = nn.Linear(width, 1, bias=False)
        head.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(start, dtype=np.float32)))
        model.register_module(HEAD, head.to(opening.device))
        return model

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:
        width = int(batch.ends.max()) + 1
        return {
            "input_ids": batch.input_ids[:, :width].astype("int64"),
            "ends": batch.ends.astype("int64"),
            "scores": batch.scores,
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the squared error, summed over the rows of a batch."""
        found = pooled_scores(model, tensors["input_ids"], tensors["ends"])
        error = found - tensors["scores"]
        return (error**2).sum(), {"absolute_error": (error.abs().sum(), len(error))}

    def base_record(self) -> dict[str, Any]:
        opening = self._opened()
        assert opening.folder is not None
        spec = opening.plan.quant_spec
        return {
            "base": {"name": opening.plan.config.model_name, "identity": identity(opening.folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": opening.plan.precision,
            "head": "scalar",
        }

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write a folder that AutoModelForSequenceClassification loads."""
        base = self._opened().folder
        assert base is not None
        model.config.architectures = [type(model).__name__]
        tensors = {name: tensor for name, tensor in model.state_dict().items()}
        export.save_model(folder, model.config, tensors.items(), base=base)
        write_json(folder / RECORD, self.base_record())

    def _opened(self) -> Opening:
        assert self.opening is not None, "the model is not built yet"
        return self.opening


def pooled_scores(model: Any, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the head's output after the token `ends` of each row, in fp32. Rows are padded on the right."""
    body = getattr(model, model.base_model_prefix)
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(ids), device=ids.device), ends]
    scores: torch.Tensor = nn.functional.linear(last.float(), model.get_submodule(HEAD).weight.float())[:, 0]
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


def read_saved_head(folder: Path) -> Array | None:
    """Return the head of a folder that holds a trained reward model; None for a language model."""
    from crosstune.torch_engine.stream import find_tensors, read_tensor

    places = find_tensors(folder)
    name = f"{HEAD}.weight"
    return read_tensor(places[name]).float().numpy() if name in places else None
