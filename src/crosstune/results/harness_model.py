"""Let lm-evaluation-harness compute with the session of either engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.core.sampling import Sampling
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.data.render.rendering import render
from crosstune.files.journal import Journal
from crosstune.models.folder import longest_context
from crosstune.results.chat_model import ChatModel

_DEFAULT_CONTEXT = 2048
_DEFAULT_ANSWER = 256


@dataclass
class Answers:
    """The answers of a task in the order of its requests; an earlier process may have left the first ones in the journal."""

    journal: Journal
    show: Callable[[int, int], None]
    num_used: int = 0

    def compute(self, num_requests: int, size: int, answer: Callable[[slice], Sequence[Any]]) -> list[Any]:
        """Return the answers to the next requests; `answer` computes up to `size` of them."""
        found = self.journal.rows[self.num_used : self.num_used + num_requests]
        for start in range(len(found), num_requests, size):
            new = answer(slice(start, start + size))
            self.journal.add(new)
            found += new
            self.show(len(found), num_requests)
        self.num_used += num_requests
        return found


def harness_model(chat_model: ChatModel, folder: Path, answers: Answers, *, batch_size: int) -> Any:
    """Return the model for the harness, computed by the session of either engine."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    session: Any = chat_model.session
    tokenizer = chat_model.tokenizer
    context = longest_context(folder) or _DEFAULT_CONTEXT
    start = tokenizer.bos_token or tokenizer.eos_token

    class HarnessModel(TemplateLM):  # type: ignore[misc, unused-ignore]
        @property
        def eot_token_id(self) -> int:
            found = tokenizer.rust.token_to_id(tokenizer.eos_token) if tokenizer.eos_token else None
            return int(found or 0)

        @property
        def prefix_token_id(self) -> int:
            return int((tokenizer.rust.token_to_id(start) if start else None) or 0)

        @property
        def tokenizer_name(self) -> str:
            return tokenizer.digest

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return tokenizer.chat_template if chat_template else None

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            if add_generation_prompt:
                return render(chat_history, tokenizer, add_generation_prompt=True)
            asked, opening = chat_history[:-1], chat_history[-1]["content"]
            return render(asked, tokenizer, add_generation_prompt=True) + opening

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not (start and string.startswith(start))
            return list(tokenizer.rust.encode(string, add_special_tokens=add_special_tokens).ids)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            def answer(place: slice) -> list[tuple[float, bool]]:
                [(_, prompt, said)] = requests[place]
                tokens = np.array([*prompt, *said][-context:], dtype=np.int32)
                supervised = np.arange(len(tokens)) >= len(tokens) - len(said)
                example = Example(tokens=tokens, supervised=supervised, index=0)
                result = session.evaluate([pad_rows([example], pad_id=tokenizer.pad_id)])
                return [(-result.loss * result.weight, result.metrics["exact_match"] == 1.0)]

            return [(value, is_greedy) for value, is_greedy in answers.compute(len(requests), 1, answer)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            sums = []
            for request in requests:
                windows = get_rolling_token_windows(
                    self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=context - 1,
                    context_len=1,
                )
                parts = [(None, *make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            def answer(place: slice) -> list[str]:
                batch = [each.args for each in requests[place]]
                return [
                    text
                    for settings, group in itertools.groupby(batch, key=lambda each: each[1])
                    for text in self._generate([prompt for prompt, _ in group], settings)
                ]

            return answers.compute(len(requests), batch_size, answer)

        def _generate(self, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
            length = int(settings.get("max_gen_toks", _DEFAULT_ANSWER))
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else until
            warmth = float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0
            generated = session.generate(
                [self.tok_encode(prompt)[-max(1, context - length) :] for prompt in prompts],
                max_new_tokens=length,
                stop_ids=sorted(tokenizer.stop_ids),
                sampling=replace(Sampling(), temperature=warmth),
            )
            texts = [tokenizer.decode(answer) for answer in generated]
            return [
                min((text.split(stop)[0] for stop in until if stop), key=len, default=text) for text in texts
            ]

    return HarnessModel()
