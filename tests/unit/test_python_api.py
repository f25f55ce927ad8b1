"""The Python interface without training: its names, arguments and callbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crosstune
from crosstune.api.arguments import read_config
from crosstune.api.callbacks import Callbacks
from crosstune.core.errors import UserError
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


@pytest.mark.parametrize("name", ["train", "plan"])
def test_an_argument_without_a_name_is_explained(name: str) -> None:
    with pytest.raises(UserError, match="keyword arguments") as caught:
        getattr(crosstune, name)("tiny-random", dataset="chats.jsonl")
    assert f"{name}(model_name='tiny-random'" in caught.value.do


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


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt("boom")])
def test_an_error_waits_until_the_run_has_ended(error: BaseException) -> None:
    def fail(metrics: Any) -> None:
        raise error

    recorder = Recorder()
    called, stop = send([fail, recorder])
    called.on_step(METRICS)
    assert recorder.seen == ["warning", 1, 1], "the others are still called"
    assert stop.reason == f"{type(error).__name__} in a callback: {error}"
    assert called.error is error


def test_a_second_ctrl_c_is_not_held_back() -> None:
    """The handler of the first one requests a stop, and raises for the second one."""

    def interrupt(metrics: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send([lambda metrics: crosstune.STOP, interrupt])


@pytest.mark.parametrize("callback", [Recorder, "wandb", None, object()])
def test_what_is_not_a_callback(callback: Any) -> None:
    with pytest.raises(UserError, match="is not a callback"):
        send([callback])
