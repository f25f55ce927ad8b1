"""Whether a result does what was trained: logits on a few prompts, the rendered chat, the first and last token."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.config.load import load_config, make_config
from crosstune.config.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.logit_distance import BOUNDS, Agreement, Logits
from crosstune.core.protocols import Observer
from crosstune.core.quantization import QuantSpec
from crosstune.data.chat import encode_prompt, render
from crosstune.data.tokenizer import Tokenizer
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import read_quantization
from crosstune.models.staged import Unverified, unverified_path
from crosstune.planner.gather import make_plan, plan_like, plan_over_quantized
from crosstune.results.trained_folder import Trained
from crosstune.runs.open_parts import find_model, open_session

_PROMPTS = (
    "What is the capital of France?",
    "Turn on the light in the kitchen at seven, and play some music after that.",
    "Write three short sentences about the sea, one for each of the colours blue, green and grey.",
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A trained thing with its base found on this machine, and what it is asked to compare it by."""

    trained: Trained
    plan: Plan
    model: ModelFolder
    prompts: list[list[int]]

    @property
    def precision(self) -> str:
        return self.plan.precision


def open_trained(trained: Trained, *, backend: str, observer: Observer) -> Opened:
    if backend == "auto":
        backend = load_config().backend  # which the environment may name
    plan = _torch_plan(make_plan(make_config(**trained.options(), backend=backend)), asked=backend)
    if trained.adapter is None and plan.backend.name == "cpu":
        # It costs no more memory than autocast, and rounding does not hide what is to be seen.
        plan = plan_like(plan, trained.options() | {"precision": "fp32"})
    model = find_model(plan.config, observer)
    return Opened(trained=trained, plan=plan, model=model, prompts=make_prompts(model.path))


def require_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{what} needs torch.", why="it is not installed here.", do="pip install 'crosstune[torch]'"
        )


def _torch_plan(plan: Plan, *, asked: str) -> Plan:
    """Results are made and compared by torch, also where MLX has trained them and `auto` means MLX."""
    if plan.engine == "torch":
        return plan
    if asked != "auto":
        raise UserError(
            f"--backend {asked} cannot be used here.",
            why="results are made and compared by torch.",
            do="leave --backend out, or use --backend cpu",
        )
    require_torch("Merging, exporting and converting")
    return make_plan(dataclasses.replace(plan.config, backend="cpu", precision="auto"))


def make_prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(folder)
    return [encode_prompt([{"role": "user", "content": text}], tokenizer) for text in _PROMPTS]


def trained_logits(opened: Opened, *, quantized: bool = True, folder: Path | None = None) -> Logits:
    """Logits of the adapter over its base, opened as for training; `folder` takes the place of the base's."""
    options = opened.trained.options(quantized=quantized) | {"precision": opened.precision}
    model = opened.model if folder is None else replace(opened.model, path=folder)
    session: Any = open_session(plan_like(opened.plan, options), model, trained=False)
    return session.logits(opened.prompts)


def folder_logits(folder: Path, opened: Opened, *, gguf: str | None = None) -> Logits:
    """Logits of a model folder, as transformers loads it or, where its weights are quantized, as training does."""
    from crosstune.torch_engine import verify
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.precision import PRECISIONS

    held = None if gguf else read_quantization(folder)
    if held is None:
        device = open_device(opened.plan.backend)
        precision = PRECISIONS[opened.precision]
        return verify.folder_logits(folder, opened.prompts, precision=precision, device=device, gguf=gguf)
    plan = quantized_plan(opened, held.spec, folder=folder)
    model = ModelFolder(name=str(folder), path=folder, source="folder")
    session: Any = open_session(plan, model, trained=False)
    return session.logits(opened.prompts)


def find_quantizer(opened: Opened, spec: QuantSpec) -> Opened:
    """The same with the machine's quantizers known; an error where the one in question does not run."""
    plan = quantized_plan(opened, spec, folder=opened.model.path)
    return replace(opened, plan=replace(opened.plan, machine=plan.machine, backend=plan.backend))


def quantized_plan(opened: Opened, spec: QuantSpec, *, folder: Path) -> Plan:
    """The plan to open a folder of quantized weights; an error where its quantizer does not run."""
    return plan_over_quantized(opened.plan, spec, folder=folder)


def judge(agreement: Agreement, *formats: str) -> dict[str, Any]:
    """The agreement with its bound, which is that of the coarsest of the number formats involved."""
    bound = max(BOUNDS.get(word.partition("_")[0] if word not in BOUNDS else word, 1.0) for word in formats)
    return {"agreement": agreement.to_json(), "bound": bound, "verified": agreement.relative <= bound}


def refuse_unverified(report: Mapping[str, Any], out: Path) -> None:
    problems = list(report.get("problems", ()))
    if not report["verified"]:
        problems.append(
            f"its logits are {report['agreement']['relative']:.2g} away from those of the trained model (relative), "
            f"beyond the bound of {report['bound']:g}"
        )
    if problems:
        raise Unverified(
            f"The result does not do what was trained; it is kept as {unverified_path(out)}.",
            why="; ".join(problems) + ".",
            do="do not use that folder; report it with these numbers",
        )


def chat_problems(before: Path, after: Path) -> list[str]:
    """What an exported tokenizer does otherwise."""
    old, new = Tokenizer.from_folder(before), Tokenizer.from_folder(after)
    turns = [
        {"role": "user", "content": _PROMPTS[0]},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": _PROMPTS[1]},
    ]
    problems = []
    if render(turns, old, add_generation_prompt=True) != render(turns, new, add_generation_prompt=True):
        problems.append("the chat template renders otherwise")
    if make_prompts(before) != make_prompts(after):
        problems.append("the tokens of a prompt differ")
    for role, ours, theirs in (("bos", old.bos_token, new.bos_token), ("eos", old.eos_token, new.eos_token)):
        if ours != theirs:
            problems.append(f"the {role} token is {theirs!r} instead of {ours!r}")
    return problems
