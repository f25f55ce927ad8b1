"""Train and run a judge with MLX: label tokens with soft targets and shared prefixes, or a head for scores or rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.core.weights import uniform_by_name
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import read_json, write_json
from crosstune.files.safetensors_header import read_header
from crosstune.mlx_engine.adapters import is_head
from crosstune.mlx_engine.expert_adapters import Adapter
from crosstune.mlx_engine.limits import memory_errors
from crosstune.mlx_engine.load import check_readable, read_model
from crosstune.mlx_engine.model_folders import dense_arrays
from crosstune.mlx_engine.save_model import save_arrays
from crosstune.mlx_engine.split_head import split_model
from crosstune.mlx_engine.task import Arrays, BuildContext, Loss, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLM, round_up
from crosstune.models.folder import config_shape, read_config_json, weight_files
from crosstune.models.identity import RECORD
from crosstune.models.llama_layout import CONFIG
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.recipes.judge.rewards import REWARD_METRICS, bradley_terry, measure_rewards

HEAD = "score"
"""The name of a sequence classifier's head in transformers."""


class ScoreTokens(CausalLM):
    """A language model with soft targets: a target may be divided between two tokens."""

    eval_metric_names = ()

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:  # type: ignore[override]
        arrays = dict(super().arrays(batch))
        count = len(arrays["places"])
        return arrays | {
            "others": self.at_places(batch.others, batch, count),
            "shares": self.at_places(batch.shares, batch, count),
        }

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.prepared(arrays)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The keys and values of a prefix that several prompts share, for each layer."""

    states: Sequence[Sequence[mx.array]]
    length: int

    def repeated(self, count: int) -> list[KVCache]:
        caches = []
        for keys, values in self.states:
            cache = KVCache()
            cache.keys, cache.values = (mx.repeat(array, count, axis=0) for array in (keys, values))
            cache.offset = self.length
            caches.append(cache)
        return caches


def read_prefix(session: Any, tokens: Sequence[int]) -> Prefix | None:
    """Compute the keys and values of a prefix; None for a model with a different kind of cache."""
    caches = make_prompt_cache(session.model)
    if any(type(cache) is not KVCache for cache in caches):
        return None
    with memory_errors(doing=EVALUATING):
        session.model(mx.array([list(tokens)]), cache=caches)
        # The arrays of a cache are longer than its contents.
        states = [
            tuple(array[..., : cache.offset, :] for array in (cache.keys, cache.values)) for cache in caches
        ]
        mx.eval(states)
    return Prefix(states=states, length=len(tokens))


def next_log_probs(
    session: Any,
    rows: Sequence[Sequence[int]],
    *,
    token_ids: Sequence[int],
    last: int,
    prefix: Prefix | None = None,
) -> NDArray[np.float64]:
    """Return the log probabilities of `token_ids` after each of the `last` positions of each row, in fp32.

    Rows are padded on the right: attention is causal, so no token attends to the padding.
    """
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), dtype=np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    ends = np.array([number * width + len(row) for number, row in enumerate(rows)])
    places = (ends[:, None] + np.arange(-last, 0)).reshape(-1)
    options = {"cache": prefix.repeated(len(rows))} if prefix is not None else {}
    with memory_errors(doing=EVALUATING):
        logits = session.task.prepared.logits_at(mx.array(ids), mx.array(places), **options).astype(
            mx.float32
        )
        log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = log_probs[:, mx.array(list(token_ids))]
        mx.eval(chosen)
    return np.array(chosen).astype(np.float64).reshape(len(rows), last, len(token_ids))


class Head(nn.Module):
    """A linear layer with one output. Not an nn.Linear, so that it gets no adapter: all of it is trained."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden.astype(mx.float32) @ self.weight.astype(mx.float32).T


class ScalarHead(CausalLM):
    """A sequence classifier with one output: the score as a fraction of the scale, read after the prompt."""

    metric_names: Sequence[str] = ("absolute_error",)
    head_names: Sequence[str] = (f"{HEAD}.weight",)

    def __init__(self) -> None:
        self.eval_metric_names = self.metric_names

    def build(self, opening: BuildContext) -> nn.Module:
        """Add a new head to a language model's body, or load a folder that already has one."""
        self.opening = opening
        name, config = self.head_names[0], read_config_json(self._folder)
        stored = [path for path in weight_files(self._folder) if name in read_header(path)[0]]
        if stored:
            check_readable(self._folder, config)
            model = read_model(self._folder, config, strict=False)
            model.set_dtype(opening.dtype)
            arrays: Any = mx.load(str(stored[0]))
            weight = arrays[name].astype(mx.float32)
        else:
            model, shape = super().build(opening), config_shape(config)
            assert shape is not None, "config.json has the sizes of the model"
            weight = mx.array(uniform_by_name(HEAD, shape=(1, shape.hidden), seed=opening.plan.config.seed))
        for path, module in model.named_modules():
            if is_head(path):  # without an effect on the score
                module.freeze()
        model[HEAD] = Head(weight)
        return model

    def prepare_loss(self, model: nn.Module) -> Loss:
        split = split_model(model)
        if split is None:
            raise UserError(
                f"--head scalar does not work with '{getattr(model, 'model_type', '?')}' models on MLX.",
                why="its hidden states cannot be read before its output head.",
                do="use a torch backend, or --head tokens",
            )
        self._split = split
        return Loss(model, self.loss)

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        width = int(batch.ends.max()) + 1
        width = min(round_up(width), batch.input_ids.shape[1]) if self.opening.compiled else width
        places = (np.arange(len(batch.ends)) * width + batch.ends).astype(np.int32)
        return {"input_ids": batch.input_ids[:, :width], "places": places, "scores": batch.scores}

    def loss(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.measure(self.outputs(arrays["input_ids"], arrays["places"]), arrays["scores"])

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.loss(self._split.model, arrays)

    def outputs(self, ids: mx.array, places: mx.array) -> mx.array:
        """Return the head's output after some positions, indices into the flattened rows."""
        found: mx.array = self._split.model[HEAD](self._split.hidden(ids)[places])[:, 0]
        return found

    def measure(self, found: mx.array, scores: mx.array) -> tuple[mx.array, MetricSums]:
        """Return the loss of the head's outputs: the squared error, summed over the rows."""
        error = found - scores
        return (error**2).sum(), {"absolute_error": (mx.stop_gradient(mx.abs(error).sum()), len(error))}

    def check_weights(self, model: nn.Module, trained: Mapping[str, Any]) -> None:
        super().check_weights(model, {k: v for k, v in trained.items() if k not in self.head_names})

    def write_model(self, model: nn.Module, folder: Path) -> None:
        """Write a folder that AutoModelForSequenceClassification loads, with adapters merged."""
        trained = dict(tree_flatten(model.trainable_parameters()))
        arrays = dense_arrays(
            self._folder,
            adapters={name: each for name, each in model.named_modules() if isinstance(each, Adapter)},
            saved=trained,
            modules={},
            dtype=self.opening.dtype,
        )
        arrays = {name: array for name, array in arrays.items() if not is_head(name.rpartition(".")[0])}
        arrays[self.head_names[0]] = trained[self.head_names[0]].astype(self.opening.dtype)
        save_arrays(folder, arrays, base=self._folder)
        config = read_json(folder / CONFIG)
        kinds = [kind.replace("ForCausalLM", "ForSequenceClassification") for kind in config["architectures"]]
        config |= {"architectures": kinds, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config |= {"problem_type": "regression", "pad_token_id": Tokenizer.from_folder(self._folder).pad_id}
        write_json(folder / CONFIG, config)
        write_json(folder / RECORD, self.base_record())


class RewardHead(ScalarHead):
    """A sequence classifier with one output: the reward of an answer, learned from pairs."""

    metric_names = REWARD_METRICS

    def __init__(self, *, center: float = 0.0) -> None:
        super().__init__()
        self.center = center

    def measure(self, found: mx.array, scores: mx.array) -> tuple[mx.array, MetricSums]:
        """Return the Bradley-Terry loss, summed over the pairs."""
        loss = bradley_terry(found, scores, nn.log_sigmoid, center=self.center)
        return loss, measure_rewards(mx.stop_gradient(found))


def scalar_scores(session: Any, prompts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the head's output for each prompt: the score as a fraction of the scale, or the reward."""
    width = max(map(len, prompts))
    ids = np.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], dtype=np.int32)
    places = np.array([number * width + len(prompt) - 1 for number, prompt in enumerate(prompts)])
    with memory_errors(doing=EVALUATING):
        found = session.task.outputs(mx.array(ids), mx.array(places))
        mx.eval(found)
    return np.array(found).astype(np.float64)
