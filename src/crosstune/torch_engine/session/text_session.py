"""Add logits and text generation to the session, for causal language models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.out_of_memory import EVALUATING, GENERATING
from crosstune.core.protocols import Array, Batch
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.process.ranks import SingleProcess
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.generate import OnToken, cast_once, generate
from crosstune.torch_engine.results.verify import model_logits
from crosstune.torch_engine.session.session import TorchSession
from crosstune.torch_engine.sharding.local_shard import without_gradients
from crosstune.torch_engine.task import Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM


class TextSession(TorchSession):
    """A session of a causal language model."""

    task: CausalLM

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
            for index, batch, counts in self._evaluation_turns(batches):
                values = compute(self.model, self._to_device(batch))
                if counts:
                    found[index] = values.float().cpu().numpy()
        group = self.parallel.group if self.parallel is not None else SingleProcess()
        return group.gather_vectors(found)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        with (
            self.connected(GENERATING),
            evaluating(self.model),
            memory_errors(self.device, doing=GENERATING),
            # Compiled code and FSDP2 read the weights themselves.
            contextlib.nullcontext()
            if self.parallel is not None or self.plan.config.torch_compile
            else cast_once(self.model, self.precision),
            self.precision.context(self.device),
        ):
            return generate(
                self.model,
                prompts,
                device=self.device,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                sampling=sampling,
                on_token=on_token,
            )
