"""Add logits and text generation to the session, for causal language models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from crosstune.core.answers import Answer, Earlier, OnAnswer, OnToken
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.out_of_memory import EVALUATING, GENERATING
from crosstune.core.protocols import Array, Batch
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.data.read.pictures import Picture
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.generate.answers import free_memory, sample_answers
from crosstune.torch_engine.generate.fast import (
    COPIED_SHARE,
    FEWEST_FOR_COPIES,
    FastRows,
    layer_bytes,
    longest_for_rope,
    why_no_fast_rows,
)
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.results.verify import model_logits
from crosstune.torch_engine.session.session import TorchSession
from crosstune.torch_engine.sharding.local_shard import free_gathered, sharded_modules, without_gradients
from crosstune.torch_engine.task import Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM
from crosstune.torch_engine.tasks.vision_lm import VisionLM


class TextSession(TorchSession):
    """A session of a causal language model."""

    task: CausalLM
    _decoder: FastDecoder | None = None
    """The fast layers of a model that is not trained."""

    def logits(self, prompts: Prompts) -> Logits:
        """Return the logits in eval mode, in the precision of training."""
        with self.connected(EVALUATING), evaluating(self.model), memory_errors(self.device, doing=EVALUATING):
            return model_logits(self.model, prompts, precision=self.precision, device=self.device)

    def map_batches(
        self, batches: Iterable[Batch], compute: Callable[[nn.Module, Tensors], torch.Tensor]
    ) -> list[Array]:
        """Return a vector for each batch, computed without gradients; the processes share the work."""
        found: dict[int, Array] = {}
        with (
            self.connected(EVALUATING),
            evaluating(self.model),
            self.parallel.passes(self.model, doing=EVALUATING) if self.parallel else contextlib.nullcontext(),
            memory_errors(self.device, doing=EVALUATING),
            without_gradients(self.model),
            self.precision.context(self.device),
        ):
            for index, batch, counts in self._evaluation_batches(batches):
                values = compute(self.model, self._to_device(batch))
                if counts:
                    found[index] = values.float().cpu().numpy()
        return self.gather_vectors(found)

    def own_prompts(self, count: int) -> range:
        return range(count) if sharded_modules(self.model) else self.own_share(count)

    def own_share(self, count: int) -> range:
        return range(self.group.ranks.rank, count, self.group.ranks.size)

    def gather_vectors(self, own: Mapping[int, Array]) -> list[Array]:
        with self.connected(GENERATING):
            return self.group.gather_vectors(own)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        return [answer.content for answer in self.sample(prompts, **options)]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        earlier: Earlier | None = None,
        on_token: OnToken | None = None,
        on_answer: OnAnswer | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Answer]:
        """Answer with the fast layers if they know the model, else with its modules; models with recurrent states, and prompts
        with `pictures`, by transformers' generate."""
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": stop_ids,
            "sampling": sampling,
            "earlier": earlier,
        }
        options |= {"on_token": on_token, "on_answer": on_answer}
        longest = max(map(len, prompts), default=0) + max_new_tokens
        with (
            self.connected(GENERATING),
            evaluating(self.model),
            memory_errors(self.device, doing=GENERATING),
        ):
            decoder = self._generating_decoder(longest, max_new_tokens) if pictures is None else None
            with without_gradients(self.model):
                if decoder is not None:
                    rows = FastRows(decoder)
                    with (
                        decoder.dequantized()
                        if self._holds_dense(decoder, max_new_tokens)
                        else contextlib.nullcontext()
                    ):
                        return sample_answers(rows, prompts, **options)
                if pictures is not None:
                    options |= self._picture_options(prompts, pictures)
                return self._sample_generally(prompts, options)

    def _holds_dense(self, decoder: FastDecoder, num_new: int) -> bool:
        """Return True if answers are long enough for dense copies of quantized weights, and the copies fit."""
        needed = decoder.dequantized_bytes()
        return num_new >= FEWEST_FOR_COPIES and 0 < needed <= COPIED_SHARE * free_memory(self.device)

    def _picture_options(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Sequence[Picture]]
    ) -> dict[str, Any]:
        """Return the options of generating with pictures: prompts with equal tokens may have different pictures."""
        task = self.task
        assert isinstance(task, VisionLM), "only the task of vision-language models reads pictures"
        keys = [
            (*prompt, *(one.sha256 for one in own)) for prompt, own in zip(prompts, pictures, strict=True)
        ]
        return {
            "numbers": [keys[:place].count(key) for place, key in enumerate(keys)],
            "inputs_of": lambda places: task.prompt_inputs(
                [prompts[place] for place in places], [pictures[place] for place in places]
            ),
        }

    def _sample_generally(self, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> list[Answer]:
        # It imports transformers.
        from crosstune.torch_engine.generate.general import GeneralRows, cast_once, has_plain_cache
        from crosstune.torch_engine.generate.stateful import sample_batches

        is_sharded = bool(sharded_modules(self.model))
        try:
            with (
                # Compiled code and FSDP2 read the weights themselves.
                contextlib.nullcontext()
                if self.parallel is not None or self.plan.config.torch_compile
                else cast_once(self.model, self.precision),
                self.precision.context(self.device),
            ):
                if "inputs_of" in options or not has_plain_cache(self.model):
                    return sample_batches(self.model, prompts, device=self.device, **options)
                rows = GeneralRows(self.model, self.device)
                return sample_answers(rows, prompts, **options, synchronized=is_sharded)
        finally:
            free_gathered(self.model)

    def _generating_decoder(self, longest: int, num_new: int) -> FastDecoder | None:
        """Return the fast layers for rows of this length: the layers of training; for a model that is not trained, layers
        that share its weights; otherwise layers with copies, if they fit and the answers are long enough."""
        known, config = self.task.decoder or self._decoder, self.plan.config
        if longest > longest_for_rope(self.model.config):
            return None
        asked_general = config.kernels == "general" and "kernels" in config.sources
        if known is not None or asked_general or config.torch_compile or sharded_modules(self.model):
            return known
        if why_no_fast_rows(self.model, self.adapters, self.device):
            return None
        dtype, is_trained = self.precision.autocast or self.precision.weights, self.optimizer is not None
        if is_trained and (
            num_new < FEWEST_FOR_COPIES
            or layer_bytes(self.model, dtype) > COPIED_SHARE * free_memory(self.device)
        ):
            return None
        in_fp8 = self.plan.quantizer == "fp8" and why_no_fp8(self.device, dtype) is None
        outside = (self.plan.base.outside_fp8 if self.plan.base is not None else None) or ()
        found = FastDecoder(self.model, dtype=dtype, fp8=in_fp8, outside_fp8=outside, copies=is_trained)
        self._decoder = None if is_trained else found
        return found
