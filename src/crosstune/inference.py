"""Opening what was trained, or any model, to talk to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import load_config, make_config
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Observer, Session
from crosstune.data.chat import Message, encode_prompt
from crosstune.data.tokenizer import Tokenizer
from crosstune.run import find_model, make_plan, open_session


@dataclass(frozen=True, kw_only=True)
class Talker:
    """A model ready to answer."""

    session: Session
    tokenizer: Tokenizer

    def answer(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """The model's next turn. `on_text` hears it piece by piece."""
        stream = _TextStream(self.tokenizer, on_text) if on_text is not None else None
        [tokens] = self.session.generate(
            [encode_prompt(messages, self.tokenizer)],
            max_new_tokens=max_new_tokens,
            stop_ids=sorted(self.tokenizer.stop_ids),
            temperature=temperature,
            seed=seed,
            on_token=stream.on_token if stream else None,
        )
        return self.tokenizer.decode(tokens).strip()


class _TextStream:
    """Tokens to text as they come; bytes of an unfinished character wait for the rest of it."""

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


def open_talker(target: str, *, observer: Observer, backend: str = "auto", precision: str = "auto") -> Talker:
    """`target` is a run folder, an adapter folder, or anything that --model_name takes."""
    if backend == "auto":
        backend = load_config().backend  # which the environment may name
    config = _config_for(target, backend=backend, precision=precision)
    plan = make_plan(config)
    model = find_model(plan.config, observer)
    return Talker(
        session=open_session(plan, model, trained=False), tokenizer=Tokenizer.from_folder(model.path)
    )


def _config_for(target: str, **hardware: Any) -> Config:
    folder = Path(target).expanduser()
    if (folder / "plan.json").is_file():
        folder = _result_of_run(folder)
    if not (folder / "adapter_config.json").is_file():
        name = str(folder) if folder.is_dir() else target
        return make_config(model_name=name, train_type="full", **hardware)
    adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if adapter.get("peft_type") != "LORA":
        raise UserError(
            f"{folder} is an adapter of a kind that cannot be opened yet.", do="use a LoRA adapter"
        )
    targets = adapter["target_modules"]
    return make_config(
        model_name=_base_of(folder, adapter["base_model_name_or_path"]),
        train_type="dora" if adapter.get("use_dora") else "lora",
        base_adapter=str(folder),
        lora_rank=adapter["r"],
        lora_alpha=adapter["lora_alpha"],
        use_rslora=bool(adapter.get("use_rslora")),
        **_quantization(folder),
        lora_target_modules=targets if isinstance(targets, str) else ",".join(targets),
        **hardware,
    )


def _base_of(folder: Path, written: str) -> str:
    """The base as PEFT finds it; on a machine that has no such folder, the name it was asked for by."""
    if not Path(written).is_absolute() or Path(written).is_dir():
        return written
    return str(_record(folder).get("base", {}).get("name", written))


def _record(folder: Path) -> dict[str, Any]:
    path = folder / "crosstune.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _quantization(folder: Path) -> dict[str, Any]:
    """The base as it was when the adapter was trained: an adapter learns to correct that one's errors too."""
    spec = _record(folder).get("quantization")
    if spec is None:
        return {}
    return {
        "quantization_backend": spec["quantizer"],
        "n_bits": spec["bits"],
        "group_size": spec["group_size"],
        "quant_type": spec["kind"],
        "double_quant": spec["double"],
    }


def _result_of_run(folder: Path) -> Path:
    for name in ("adapter", "model"):
        if (folder / name).is_dir():
            return folder / name
    raise UserError(
        f"The run {folder} has left no adapter and no model.",
        why="it did not finish a step, or ran with --save_model false.",
    )
