"""`crosstune.load`: open a trained run or any model to generate, merge and export."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from crosstune.api.arguments import PathLike, rephrase_errors
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer, Observers, Warned
from crosstune.core.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from crosstune.data.tokens.tokenizer import Tokenizer
    from crosstune.results.chat_model import ChatModel
    from crosstune.results.opened import Request


class Model:
    """A trained run, an adapter on its base, or a model. Weights are loaded on first use."""

    def __init__(self, target: str, *, backend: str, precision: str, observer: Observer) -> None:
        self.target, self.backend, self.precision = target, backend, precision
        self._observer = observer
        self._opened: ChatModel | None = None

    @overload
    def generate(
        self,
        prompt: str,
        *,
        system: str = ...,
        max_new_tokens: int = ...,
        on_text: Callable[[str], None] | None = ...,
        **sampling: float,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        system: str = ...,
        max_new_tokens: int = ...,
        on_text: None = ...,
        **sampling: float,
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        system: str = "",
        max_new_tokens: int = 256,
        on_text: Callable[[str], None] | None = None,
        **sampling: float,
    ) -> str | list[str]:
        """Answer one prompt or a list of prompts, each as the first message of a chat.

        `sampling`: temperature, top_k, top_p, min_p, repetition_penalty, seed; greedy by default. `on_text` receives the
        answer to a single prompt while it is generated.
        """
        start = [{"role": "system", "content": system}] * bool(system)
        if isinstance(prompt, str):
            messages = [*start, {"role": "user", "content": prompt}]
            return self.chat(messages, max_new_tokens=max_new_tokens, on_text=on_text, **sampling)
        conversations = [[*start, {"role": "user", "content": text}] for text in prompt]
        with rephrase_errors():
            settings = _read_sampling(sampling, max_new_tokens)
            if not conversations:
                return []
            return self._chat_model().answers(conversations, max_new_tokens=max_new_tokens, sampling=settings)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        on_text: Callable[[str], None] | None = None,
        **sampling: float,
    ) -> str:
        """Return the model's next turn in a conversation of dicts with `role` and `content`."""
        with rephrase_errors():
            settings = _read_sampling(sampling, max_new_tokens)
            return self._chat_model().answer(
                [dict(message) for message in messages],
                max_new_tokens=max_new_tokens,
                sampling=settings,
                on_text=on_text,
            )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each token, shape (tokens, vocabulary)."""
        session: Any = self._chat_model().session
        [found] = session.logits([list(tokens)])
        logits: NDArray[np.float32] = found
        return logits

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text).ids` and `decode(ids)`."""
        return self._chat_model().tokenizer

    def merge(
        self,
        out: PathLike | None = None,
        *,
        into: str | None = None,
        dtype: str = "auto",
        base: str | None = None,
        force: bool = False,
    ) -> Path:
        """Merge the adapter into its base like `crosstune merge`; return the model folder."""
        from crosstune.results.merge import merge

        with rephrase_errors():
            return self._written(merge(self._request(out, into, dtype, base, force), observer=self._observer))

    def export(
        self,
        out: PathLike | None = None,
        *,
        to: str = "hf",
        n_bits: int = 16,
        group_size: int = 64,
        gguf_type: str = "auto",
        into: str | None = None,
        dtype: str = "auto",
        base: str | None = None,
        force: bool = False,
    ) -> Path:
        """Export the model like `crosstune export`, to `hf`, `mlx` or `gguf`; return its folder."""
        from crosstune.results.export import FORMATS, export
        from crosstune.results.opened import Form

        if to not in FORMATS:
            raise UserError(
                f"A model cannot be exported to {to!r}.", do=f"to is one of: {', '.join(FORMATS)}"
            )
        form = Form(to=to, bits=n_bits, group_size=group_size, kind=gguf_type)
        request = self._request(out, into, dtype, base, force)
        with rephrase_errors():
            return self._written(export(request, form, observer=self._observer))

    def close(self) -> None:
        """Release the weights; the next use loads them again."""
        self._opened = None
        gc.collect()  # a session has reference cycles

    def __repr__(self) -> str:
        return f"Model({self.target!r})"

    def _chat_model(self) -> ChatModel:
        from crosstune.results.chat_model import open_chat_model

        if self._opened is None:
            with rephrase_errors():
                self._opened = open_chat_model(
                    self.target, observer=self._observer, backend=self.backend, precision=self.precision
                )
        return self._opened

    def _request(
        self, out: PathLike | None, into: str | None, dtype: str, base: str | None, force: bool
    ) -> Request:
        from crosstune.results.opened import Request

        self.close()  # merging and exporting load the weights themselves
        return Request(
            target=self.target,
            out=Path(out).expanduser().absolute() if out is not None else None,
            into=into,
            dtype=dtype,
            base=base,
            force=force,
            backend=self.backend,
        )

    def _written(self, report: Mapping[str, Any]) -> Path:
        for sentence in report.get("warnings", ()):
            self._observer.on_event(Warned(message=sentence))
        return Path(report["path"])


def load(target: PathLike, *, backend: str = "auto", precision: str = "auto", progress: bool = True) -> Model:
    """Open a run by its folder or name, an adapter folder, or a model: a folder, a .gguf file, a hub id or a bundled name.

    A model that is not available locally is downloaded. `progress=False` prints nothing.
    """
    from crosstune.cli.terminal.screen import Screen
    from crosstune.config.load import make_config
    from crosstune.files.paths import named_run
    from crosstune.models.bundled import BUNDLED
    from crosstune.runs.open_parts import find_model
    from crosstune.runs.trained_folder import find_trained

    if not isinstance(target, (str, os.PathLike)):
        raise UserError(
            f"A {type(target).__qualname__} cannot be loaded.",
            do="pass the folder of a run, an adapter or a model, or the name of a model; a model object is already loaded",
        )
    observer: Observer = Screen(live=True) if progress else Observers()
    name = os.fspath(target)
    name = name if name in BUNDLED else named_run(name)
    with rephrase_errors():
        find_model(make_config(model_name=find_trained(name).base), observer)
    return Model(name, backend=backend, precision=precision, observer=observer)


def _read_sampling(settings: Mapping[str, float], max_new_tokens: int) -> Sampling:
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise UserError(
            f"max_new_tokens cannot be {shown(max_new_tokens)}.", do="pass an integer of 1 or more"
        )
    known = [field.name for field in fields(Sampling)]
    for name, value in settings.items():
        if name not in known:
            names = ", ".join(["system", "max_new_tokens", "on_text", *sorted(known)])
            raise UserError(f"Unknown setting {name!r}.", do=f"use one of: {names}")
        if not isinstance(value, (int, float)):
            raise UserError(f"{name} cannot be {shown(value)}.", do="pass a number")
    whole = {name: int(settings[name]) for name in ("seed", "top_k") if name in settings}
    return Sampling(**{**settings, **whole})  # type: ignore[arg-type]
