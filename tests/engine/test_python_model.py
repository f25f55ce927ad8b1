"""Models that `crosstune.load` opens, and training with a different tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import chat

import crosstune
from crosstune.checkpoint.read import open_checkpoint
from crosstune.core.events import Observers
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import read_json
from crosstune.models.adapter_files import TOKENIZER_FILES
from crosstune.runs.move import move
from crosstune.runs.restore import export_checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [chat(f"count to {n}", f"one to {n}") for n in range(12)]
QUICK = {"backend": "cpu", "precision": "fp32", "max_steps": 2, "skip_eval": True, "progress": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))


def train(model: Path, folder: Path, **more: Any) -> crosstune.Run:
    options: dict[str, Any] = {"output_dir": folder.parent, "name": folder.name, "dataset": ROWS}
    return crosstune.train(**QUICK | options | {"model_name": model} | more)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> crosstune.Run:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return crosstune.train(
        **QUICK,
        model_name=tiny_model,
        output_dir=folder.parent,
        name=folder.name,
        dataset="commands",
        lr=0.01,
    )


def open_tokenizer(folder: Path, *, template: str = TEMPLATE) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def test_generating_alone_and_together(run: crosstune.Run) -> None:
    model = crosstune.load(run.folder, progress=False)
    prompts = ["a", "turn on the light in the kitchen", "b c"]
    texts: list[str] = []
    alone = [model.generate(prompt, max_new_tokens=6, on_text=texts.append) for prompt in prompts]
    assert model.generate(prompts, max_new_tokens=6) == alone
    assert "".join(texts[:6]).strip().startswith(alone[0][:1])
    assert run.generate(prompts[0], max_new_tokens=6) == alone[0]
    messages = [{"role": "user", "content": prompts[1]}]
    assert model.chat(messages, max_new_tokens=6) == alone[1]
    assert model.generate(["x"] * 17, max_new_tokens=1) == [model.generate("x", max_new_tokens=1)] * 17
    assert model.generate([], max_new_tokens=1) == []
    assert model.generate(prompts[0], system="be brief", max_new_tokens=6) == model.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompts[0]}], max_new_tokens=6
    )


def test_logits_are_those_of_the_next_token(run: crosstune.Run) -> None:
    model = crosstune.load(run.folder, progress=False)
    ids = list(model.tokenizer.encode("turn on the light").ids)
    logits = model.logits(ids)
    assert logits.shape == (len(ids), 512)


def test_merged_and_exported(run: crosstune.Run, tmp_path: Path) -> None:
    model = run.load(progress=False)
    merged = model.merge(tmp_path / "merged")
    assert merged == tmp_path / "merged"
    answer = model.generate("a b c", max_new_tokens=6)
    assert crosstune.load(merged, progress=False).generate("a b c", max_new_tokens=6) == answer
    exported = model.export(tmp_path / "hf", to="hf")
    assert (exported / "model.safetensors").is_file()
    with pytest.raises(crosstune.UserError, match="to is one of: hf, mlx, gguf"):
        model.export(to="onnx")


def test_what_cannot_be_loaded() -> None:
    with pytest.raises(crosstune.UserError, match="There is no folder"):
        crosstune.load("./nothing", progress=False)
    with pytest.raises(crosstune.UserError, match="cannot be loaded"):
        crosstune.load(object())  # type: ignore[arg-type]


def test_another_tokenizer_goes_with_the_run(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tiny_model)
    own, run = (train(tiny_model, tmp_path / name, **more) for name, more in (
        ("own", {}), ("other", {"tokenizer": tokenizer}),
    ))  # fmt: skip
    identities = [read_json(each.folder / "plan.json")["identity"]["data"] for each in (own, run)]
    assert identities[0] != identities[1]
    assert run.result is not None
    saved = Tokenizer.from_folder(run.result)
    assert saved.chat_template == TEMPLATE
    assert saved.stop_ids == Tokenizer.from_folder(tiny_model).stop_ids

    model = run.load(progress=False)
    assert model.tokenizer.chat_template == TEMPLATE
    merged = model.merge(tmp_path / "merged")
    assert Tokenizer.from_folder(merged).chat_template == TEMPLATE

    assert run.checkpoint is not None
    export_checkpoint(open_checkpoint(run.checkpoint), tmp_path / "exported", observer=Observers())
    assert Tokenizer.from_folder(tmp_path / "exported").chat_template == TEMPLATE
    packed = move(run.folder, to="cpu", observer=Observers(), out=tmp_path / "run.crosstune")
    assert "tokenizer" in packed["data"]

    again = train(tiny_model, tmp_path / "other", tokenizer=tokenizer, resume="auto", max_steps=3)
    assert again.summary["steps"] == 3
    with pytest.raises(crosstune.UserError, match=r"tokenizer: .* in the checkpoint, None now"):
        train(tiny_model, tmp_path / "other", resume="auto", max_steps=4)


def test_an_object_is_the_folder_that_it_saves(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tiny_model)
    tokenizer.save_pretrained(tmp_path / "saved")
    runs = [
        train(tiny_model, tmp_path / "object", tokenizer=tokenizer, train_type="full"),
        train(tiny_model, tmp_path / "folder", tokenizer=tmp_path / "saved", train_type="full"),
    ]
    first, second = (read_json(run.folder / "plan.json")["identity"] for run in runs)
    assert first == second
    for run in runs:
        assert run.result is not None
        assert Tokenizer.from_folder(run.result).chat_template == TEMPLATE


def test_a_tokenizer_that_does_not_fit(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tiny_model)
    tokenizer.add_tokens([f"<{n}>" for n in range(600)])
    report = crosstune.plan(model_name=tiny_model, dataset=ROWS, tokenizer=tokenizer, backend="cpu")
    assert ["does not match the model" in problem.message for problem in report.problems] == [True]
    with pytest.raises(crosstune.UserError, match="has embeddings for 512 tokens"):
        train(tiny_model, tmp_path / "large", tokenizer=tokenizer)
    with pytest.raises(crosstune.UserError, match="There is no tokenizer folder"):
        train(tiny_model, tmp_path / "none", tokenizer="org/name")
    assert not (tmp_path / "large").exists()


def test_the_files_of_another_tokenizer_replace_all_of_the_models(tiny_model: Path, tmp_path: Path) -> None:
    """A template in a file of its own would win over that of the new tokenizer_config.json."""
    model, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    other.mkdir()
    for name in TOKENIZER_FILES:
        if (tiny_model / name).is_file() and name not in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(tiny_model / name, other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    run = train(model, tmp_path / "run", tokenizer=other)
    assert run.result is not None
    assert Tokenizer.from_folder(run.result).chat_template == TEMPLATE
