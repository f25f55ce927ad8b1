"""Train and run a judge with torch: label tokens with soft targets and shared prefixes, or a head for scores or rewards."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForSequenceClassification, DynamicCache
from transformers.cache_utils import DynamicLayer

from crosstune.core.errors import UserError
from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.core.weights import uniform_by_name
from crosstune.data.batches.token_batch import IGNORED
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import write_json
from crosstune.models.folder import readable_errors
from crosstune.models.identity import RECORD, base_record
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.recipes.judge.rewards import HeadLoss
from crosstune.torch_engine import array_functions
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.loading.load import load_model, read_config
from crosstune.torch_engine.loading.stream import find_tensors
from crosstune.torch_engine.results import export
from crosstune.torch_engine.task import BuildContext, MetricSums, Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM, takes_logits_to_keep
from crosstune.torch_engine.tasks.model_input import ModelInput
from crosstune.torch_engine.tasks.token_losses import cross_entropy_sum

HEAD = "score"
"""The name of a sequence classifier's head in transformers."""


class ScoreTokens(CausalLM):
    """A language model with soft targets: a target may be divided between two tokens."""

    eval_metric_names = ()

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:  # type: ignore[override]
        arrays = dict(super().arrays(batch))
        if not batch.shares.any():
            return arrays
        supervised = batch.targets != IGNORED
        return arrays | {
            "others": batch.others[supervised].astype("int64"),
            "shares": batch.shares[supervised],
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the cross entropy to the soft targets, summed over the supervised tokens.

        Moving a fraction s to another token adds s times the difference of the two logits to the loss of the first token.
        """
        targets = tensors["targets"]
        logits = self.supervised_logits(model, ModelInput.of(tensors))
        loss = cross_entropy_sum(logits, targets)
        if "others" not in tensors:
            return loss, {}
        others, shares = tensors["others"], tensors["shares"]
        [soft] = shares.nonzero(as_tuple=True)
        rows = logits[soft].float()
        first, second = (rows.gather(1, ids[soft][:, None])[:, 0] for ids in (targets, others))
        return loss + (shares[soft] * (first - second)).sum(), {}

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        return self.loss(model, tensors)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The keys and values of a prefix that several prompts share."""

    cache: DynamicCache
    length: int

    def repeated(self, count: int) -> DynamicCache:
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(count)
        return cache


def read_prefix(session: Any, tokens: Sequence[int]) -> Prefix | None:
    """Compute the keys and values of a prefix; None for a model with a different kind of cache."""
    with _inference(session):
        ids = torch.tensor([list(tokens)], device=session.device)
        cache = session.model(input_ids=ids, use_cache=True, **_keep(session.model, 1)).past_key_values
    if type(cache) is not DynamicCache or {type(layer) for layer in cache.layers} != {DynamicLayer}:
        return None
    return Prefix(cache=cache, length=len(tokens))


def next_log_probs(
    session: Any,
    rows: Sequence[Sequence[int]],
    *,
    token_ids: Sequence[int],
    last: int,
    prefix: Prefix | None = None,
) -> NDArray[np.float64]:
    """Return the log probabilities of `token_ids` after each of the `last` positions of each row.

    Rows are padded on the left, so that their last positions are the last columns.
    """
    width, start = max(map(len, rows)), prefix.length if prefix is not None else 0
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), start + width), dtype=np.int64)
    mask[:, :start] = 1
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = row
        mask[number, start + width - len(row) :] = 1
    positions = (mask.cumsum(axis=1) - 1).clip(min=0)[:, start:]
    options: dict[str, Any] = {"position_ids": torch.from_numpy(positions).to(session.device)}
    if not mask.all():
        options["attention_mask"] = torch.from_numpy(mask).to(session.device)
    with _inference(session):
        if prefix is not None:
            options["past_key_values"] = prefix.repeated(len(rows))
        found = session.model(
            input_ids=torch.from_numpy(ids).to(session.device),
            use_cache=prefix is not None,
            **options,
            **_keep(session.model, last),
        ).logits[:, -last:]
        chosen = torch.tensor(list(token_ids), device=session.device)
        log_probs = torch.log_softmax(found.float(), dim=-1).index_select(-1, chosen)
    return log_probs.double().cpu().numpy()


def _keep(model: nn.Module, last: int) -> dict[str, Any]:
    return {"logits_to_keep": last} if takes_logits_to_keep(model) else {}


@contextlib.contextmanager
def _inference(session: Any) -> Iterator[None]:
    """Run the model without gradients and dropout, in the precision of the session."""
    with (
        evaluating(session.model),
        memory_errors(session.device, doing=EVALUATING),
        torch.inference_mode(),
        session.precision.context(session.device),
    ):
        yield


class Head(nn.Module):
    """A linear layer with one output. Not an nn.Linear, so that it gets no adapter: all of it is trained."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float())


class ScalarHead:
    """A sequence classifier with one output: the score as a fraction of the scale, read after the prompt, or a reward."""

    head_names: Sequence[str] = (f"{HEAD}.weight",)

    def __init__(self, loss: HeadLoss | None = None) -> None:
        self.head_loss = loss or HeadLoss()
        self.metric_names = self.head_loss.metric_names
        self.opening: BuildContext | None = None

    def build(self, opening: BuildContext) -> nn.Module:
        """Add a new head to a language model's body, or load a folder that already has one."""
        folder = opening.folder
        assert folder is not None, "a scalar head is added to a base model"
        self.opening = opening
        if self.head_names[0] in find_tensors(folder):
            return _load_trained(folder, opening)
        config = read_config(folder)
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UserError(
                f"--head scalar does not work with '{config.model_type}' models.",
                why="transformers has no sequence classifier for this type.",
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
        return model

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        width = int(batch.ends.max()) + 1
        return {
            "input_ids": batch.input_ids[:, :width].astype("int64"),
            "ends": batch.ends.astype("int64"),
            "scores": batch.scores,
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        outputs = model(tensors["input_ids"], tensors["ends"])
        return self.head_loss(outputs, tensors["scores"], array_functions)

    def base_record(self) -> dict[str, Any]:
        opening = self.opening
        assert opening is not None and opening.folder is not None, "the model is not built yet"
        return base_record(opening.folder, opening.plan) | {"quantization": None}

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write a folder that AutoModelForSequenceClassification loads, with adapters merged."""
        assert self.opening is not None and self.opening.folder is not None, "the model is not built yet"
        adapters = {
            name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)
        }
        # Found by the config, since FSDP2 changes the class of a sharded model.
        kind = AutoModelForSequenceClassification._model_mapping[type(model.config)]
        model.config.architectures = [kind.__name__]
        export.save_model(
            folder, model.config, export.merged_tensors(model, adapters), base=self.opening.folder
        )
        write_json(folder / RECORD, self.base_record())


def _forward(model: Any, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the head's output after the token `ends` of each row, in fp32. Rows are padded on the right."""
    hidden = getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(ids), device=ids.device), ends]
    return model.get_submodule(HEAD)(last)[:, 0]


def scalar_scores(session: Any, prompts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the head's output for each prompt: the score as a fraction of the scale, or the reward."""
    rows = [torch.tensor(list(prompt)) for prompt in prompts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(session.device)
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=session.device)
    with _inference(session):
        found = session.model(ids, ends)
    return found.double().cpu().numpy()


def _load_trained(folder: Path, opening: BuildContext) -> nn.Module:
    config = read_config(folder)  # without transformers' progress bars
    with readable_errors(folder):
        model = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=opening.precision.weights,
            trust_remote_code=False,
            local_files_only=True,
        ).to(opening.device)
    _set_head(model, model.get_submodule(HEAD).weight.detach())
    return model


def _set_head(model: Any, weight: torch.Tensor) -> None:
    """Replace the head. The model's own `forward` returns the scores, since FSDP2 gathers weights only for it."""
    setattr(model, HEAD, Head(weight))
    model.forward = functools.partial(_forward, model)
