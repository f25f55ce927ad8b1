"""Extend the session with logits and text generation for causal language models."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.out_of_memory import GENERATING
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.mlx_engine.generate import OnToken, generate
from crosstune.mlx_engine.limits import memory_errors
from crosstune.mlx_engine.session import MlxSession


class TextSession(MlxSession):
    def logits(self, prompts: Prompts) -> Logits:
        """Return the logits in the precision of training, without dropout."""
        return [np.array(self.model(mx.array([list(prompt)]))[0].astype(mx.float32)) for prompt in prompts]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        with memory_errors(doing=GENERATING):
            return generate(
                self.model,
                prompts,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                sampling=sampling,
                on_token=on_token,
            )
