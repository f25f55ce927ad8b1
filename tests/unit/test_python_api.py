"""The Python interface before it trains: its names, its arguments, its callbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crosstune
from crosstune.api.arguments import Written, put_into_python, python_words, read_config
from crosstune.api.callbacks import Callbacks
from crosstune.core.errors import ConfigError, UserError
from crosstune.core.events import Event, StepMetrics, Warned
from crosstune.loop.stop import StopSignal

METRICS: Any = {"step": 1, "loss": 2.0}


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, crosstune; dir(crosstune)\n"
        "heavy = {'numpy', 'rich', 'yaml', 'tokenizers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", crosstune.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(crosstune, name) is not None
    assert name in dir(crosstune)


def test_unknown_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        crosstune.trian  # noqa: B018


def test_options_are_those_of_the_command() -> None:
    config = read_config({"model_name": Path("some/model"), "lora_target_modules": ["q_proj", "v_proj"]})
    assert (config.model_name, config.lora_target_modules) == ("some/model", "q_proj,v_proj")
    assert config.sources == {"model_name": "argument", "lora_target_modules": "argument"}
    with pytest.raises(UserError, match="did you mean lora_rank"):
        read_config({"lora_rnk": 3})


def test_nothing_is_written_for_options_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="batch_size"):
        read_config({"batch_size": 0}, dataset=[{"text": "x"}])
    assert not list(tmp_path.iterdir())
    assert Path(read_config({}, dataset=[{"text": "x"}]).dataset).parent == tmp_path / "data"


@pytest.mark.parametrize("name", ["model_name", "model", "base_adapter"])
def test_a_model_object_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="save_pretrained") as caught:
        read_config({name: object()})
    assert f"{name} cannot be a object object" in str(caught.value)


def test_a_tokenizer_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(UserError, match=r"AutoTokenizer\.from_pretrained"):
        read_config({}, tokenizer=object())  # type: ignore[arg-type]


class Recorder:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.seen.append(metrics["step"])

    def on_event(self, event: Event) -> None:
        self.seen.append(event.kind)


def send(callbacks: Any) -> tuple[Callbacks, StopSignal]:
    stop = StopSignal()
    called = Callbacks(callbacks, stop)
    called.on_event(Warned(message="x"))
    called.on_step(METRICS)
    return called, stop


def test_objects_and_functions_are_called() -> None:
    recorder, steps = Recorder(), list[Any]()
    called, stop = send([recorder, steps.append])
    assert recorder.seen == ["warning", 1]
    assert steps == [METRICS]
    assert not stop.requested
    assert called.error is None


def _stop(metrics: Any) -> None:
    raise crosstune.StopTraining("good enough")


@pytest.mark.parametrize(
    ("callback", "reason"),
    [(lambda metrics: crosstune.STOP, "a callback"), (_stop, "good enough"), (lambda metrics: "stop", "")],
)
def test_a_callback_can_stop_the_run(callback: Any, reason: str) -> None:
    called, stop = send([callback])
    assert stop.reason == reason
    assert called.error is None


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3)])
def test_an_error_waits_until_the_run_has_ended(error: BaseException) -> None:
    def fail(metrics: Any) -> None:
        raise error

    recorder = Recorder()
    called, stop = send([fail, recorder])
    called.on_step(METRICS)
    assert recorder.seen == ["warning", 1, 1], "the others are still called"
    assert stop.reason == f"{type(error).__name__} in a callback: {error}"
    assert called.error is error


def test_ctrl_c_is_not_held_back() -> None:
    def interrupt(metrics: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send([interrupt])


@pytest.mark.parametrize("callback", [Recorder, "wandb", None, object()])
def test_what_is_not_a_callback(callback: Any) -> None:
    with pytest.raises(UserError, match="is not a callback"):
        send([callback])


def test_callbacks_are_a_list() -> None:
    with pytest.raises(UserError, match="pass a list"):
        send(print)


@pytest.mark.parametrize(
    ("said", "in_python"),
    [
        ("raise --context_length to 35.", "raise context_length to 35."),
        ("run `crosstune train --resume RUN` or crosstune plan --machine x", None),
        (
            "pip install --upgrade torch; then --backend cuda",
            "pip install --upgrade torch; then backend cuda",
        ),
    ],
)
def test_errors_name_options_instead_of_flags(said: str, in_python: str | None) -> None:
    problem = UserError(said, why=said, do=said)
    error = ConfigError([problem])
    put_into_python(error, {})
    assert error.lines() == UserError(in_python or said, why=in_python or said, do=in_python or said).lines()


def test_errors_name_the_argument_and_its_row_instead_of_a_file_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))
    written = Written()
    path = read_config({}, written=written, dataset=[{"text": "x"}]).dataset
    folder = read_config({}, written=written, eval_dataset={"test": [{"text": "y"}]}).eval_dataset
    error = UserError(f"{path}, line 2: wrong.", why=f"{folder}/test.jsonl, line 3", do=f"look at {path}")
    with pytest.raises(UserError) as caught, python_words(written):
        raise error
    assert str(caught.value).splitlines() == [
        "dataset, row 2: wrong.",
        '  why: eval_dataset["test"], row 3',
        "  do:  look at dataset",
    ]


def test_plan_raises_errors_in_the_words_of_python() -> None:
    with pytest.raises(UserError) as caught:
        crosstune.plan(machine="cpu-laptop", backend="cuda")
    assert "backend auto" in str(caught.value) and "--" not in str(caught.value)
