"""Open a trained run, or any model, for generation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import load_config, make_config
from crosstune.core.answers import Earlier
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.core.logit_distance import check_finite
from crosstune.core.protocols import Generates
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.render.types import Message
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.machines.probe import probe_machine
from crosstune.models.folder import longest_context
from crosstune.models.quantized_folder import read_quantization
from crosstune.planner.gather import make_plan, plan_over_quantized
from crosstune.recipes.judge.verdicts import read_judge_settings
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.trained_folder import Trained, check_base, find_trained

_NAMED = 5
"""Long prompts in an error."""


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A model and its tokenizer, ready to generate."""

    session: Generates
    tokenizer: Tokenizer
    max_tokens: int | None = None
    """The model's context; None if its configuration does not specify it."""

    def answer(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        on_text: Callable[[str], None] | None = None,
        place: str = "The conversation",
    ) -> str:
        """Return the model's next turn. `on_text` receives it as it is generated; `place` names the prompt in errors."""
        stream = _TextStream(self.tokenizer, on_text) if on_text is not None else None
        [answer] = self.continue_tokens(
            self.encode([messages], [place]),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            on_token=stream.on_token if stream else None,
        )
        if stream is not None:
            stream.end(answer)
        return answer

    def answers(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
    ) -> list[str]:
        """Return the model's next turn in each conversation, generated as a batch."""
        places = [f"Prompt {number}" for number, _ in enumerate(conversations, start=1)]
        tokens = self.encode(conversations, places)
        return self.continue_tokens(tokens, max_new_tokens=max_new_tokens, sampling=sampling)

    def encode(
        self, conversations: Sequence[Sequence[Message]], places: Sequence[str], *, num_new: int = 1
    ) -> list[tuple[int, ...]]:
        """Tokenize conversations. If the context has no room for `num_new` more tokens after some, raise a UserError with their
        entries in `places`."""
        found = [tuple(encode_prompt(messages, self.tokenizer)) for messages in conversations]
        most = self.max_tokens or math.inf
        long = [number for number, tokens in enumerate(found) if len(tokens) + num_new > most]
        if long:
            message = f"{places[long[0]]} is too long for this model."
            if len(long) > 1:
                named = "; ".join(places[number].rstrip(",") for number in long[:_NAMED])
                message = f"{len(long):,} prompts are too long for this model: {named}{' ...' * (len(long) > _NAMED)}"
            answer = "an answer" if num_new == 1 else f"{num_new:,} new ones"
            raise UserError(
                message,
                why=f"{len(found[long[0]]):,} tokens leave no room for {answer} in its context of {most:,}.",
                do="shorten it (in a chat, /reset starts over), lower --max_new_tokens, or use a model with a longer context",
            )
        return found

    def continue_tokens(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        earlier: Earlier | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> list[str]:
        """Return the text that follows each of the prompts of `encode`; an answer ends where the context ends."""
        groups = defaultdict[int, list[int]](list)
        for place, prompt in enumerate(prompts):
            room = max_new_tokens if self.max_tokens is None else self.max_tokens - len(prompt)
            groups[min(room, max_new_tokens)].append(place)
        answers: dict[int, str] = {}
        for num_new, places in groups.items():
            generated = self.session.generate(
                [prompts[place] for place in places],
                max_new_tokens=num_new,
                stop_ids=sorted(self.tokenizer.stop_ids),
                sampling=sampling,
                earlier=earlier,
                on_token=on_token,
            )
            answers |= zip(places, map(self.tokenizer.decode, generated), strict=True)
        return [answers[place] for place in range(len(prompts))]


class _TextStream:
    """Decode tokens incrementally; an incomplete UTF-8 character waits for its other bytes."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.tokens: list[int] = []
        self.shown = ""

    def on_token(self, token: int) -> None:
        if token in self.tokenizer.stop_ids:
            return
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.on_text(text[len(self.shown) :])
            self.shown = text

    def end(self, text: str) -> None:
        """Pass on the rest of the text: an incomplete character."""
        if rest := text[len(self.shown) :]:
            self.on_text(rest)


def open_chat_model(
    target: str, *, observer: Observer, backend: str = "auto", precision: str = "auto", chats: bool = True
) -> ChatModel:
    """Open a run folder, an adapter folder, or any value of --model_name. `chats`: warn if it has no chat template."""
    if backend == "auto":
        backend = load_config().backend  # the environment may set it
    trained = find_trained(target)
    _note_judge(target, trained, observer)
    if backend == "auto" and _needs_mlx(trained):
        backend = "mlx" if probe_machine(backends=["mlx"]).available() else "auto"
    options = trained.options()
    if precision != "auto" or backend != "auto":
        options["precision"] = precision  # the precision of training may not work on another backend
    plan = make_plan(make_config(**options, backend=backend), base=trained.base_choice)
    for adjustment in plan.adjustments:
        if adjustment.kind == "change":
            observer.on_event(adjustment.to_event())
    model = find_model(plan.config, observer)
    for sentence in check_base(trained, model):
        observer.on_event(Warned(message=sentence))
    held = read_quantization(model.path) if trained.adapter is None else None
    if held is not None:
        plan = plan_over_quantized(plan, held.spec, folder=model.path)
    session: Any = open_session(plan, model, trained=False)
    tokenizer = Tokenizer.from_folder(trained.tokenizer_folder(model.path), model=model.path)
    if chats and tokenizer.chat_template is None:
        message = (
            f"{target} has no chat template: turns are written as lines `User: ...` and `Assistant: ...`"
        )
        observer.on_event(Warned(message=message))
    check_finite(session.logits([[tokenizer.pad_id]]), target)  # NaN would become text and scores
    assert isinstance(session, Generates), "a causal language model generates"
    return ChatModel(session=session, tokenizer=tokenizer, max_tokens=longest_context(model.path))


def _note_judge(target: str, trained: Trained, observer: Observer) -> None:
    """Warn that a judge answers only with verdicts."""
    if read_judge_settings(trained.adapter or Path(trained.base).expanduser()) is not None:
        message = f"{target} is a judge and answers with verdicts only; use `crosstune judge predict {target} --input FILE`"
        observer.on_event(Warned(message=message))


def _needs_mlx(trained: Trained) -> bool:
    """Return True if the model, or the base of its adapter, is quantized by MLX."""
    folder = Path(trained.base).expanduser()
    held = read_quantization(folder) if (folder / "config.json").is_file() else None
    specs = (trained.quantization, held.spec if held is not None else None)
    return any(spec is not None and spec.quantizer == "mlx" for spec in specs)
