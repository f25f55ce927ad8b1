"""A resumed run equals the uninterrupted run, bit for bit and step by step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from injection.bench import METHODS, Bench, read_bits, weights_file, write_chats
from injection.disks import file_limit
from injection.kills import damage

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Resumed, Warned
from crosstune.core.schedule import learning_rate
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.loop import save
from crosstune.models.tiny import tiny_model
from crosstune.report.charts import run_charts
from crosstune.report.files import load_run
from crosstune.report.tables import reproduce_command
from crosstune.runs.pipeline import RunResult, choose_folder, train

NUM_STEPS = 5
EACH_METHOD = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name != "lora")) for name in METHODS]
)


class Listener:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        pass

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume"))


def run(bench: Bench, method: str, folder: Path, **more: Any) -> RunResult:
    observer = more.pop("observer", Listener())
    options = bench.options(method, folder) | {"max_steps": NUM_STEPS, "save_steps": 1, "keep_last_n": 99}
    return train(make_config(**options | more), observers=[observer])


@pytest.fixture(scope="module")
def straight(bench: Bench) -> Any:
    """A whole run of a method with a checkpoint at each step, made when first asked for."""

    def find(method: str) -> Path:
        folder = bench.home / f"every-step-{method}"
        if not folder.exists():
            run(bench, method, folder)
        return folder

    return find


def at_step(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def copy_until(folder: Path, target: Path, *, step: int) -> Path:
    """The run as a kill would have left it soon after a checkpoint: a later step is logged, and no end."""
    shutil.copytree(folder, target, symlinks=True)
    for found, path in checkpoint_folders(target / "checkpoints"):
        if found > step:
            shutil.rmtree(path)
    (target / "summary.json").unlink()
    lines = (target / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (target / "metrics.jsonl").write_bytes(b"".join(lines[: step + 1]) + b'{"step": 9, "lo')
    return target


@EACH_METHOD
def test_from_every_step_into_a_new_run(bench: Bench, straight: Any, method: str) -> None:
    wanted = read_bits(straight(method))
    assert len({row["loss"] for row in wanted["steps"]}) == NUM_STEPS
    for step in range(1, NUM_STEPS):
        folder = bench.home / f"from-{step}-{method}"
        run(bench, method, folder, resume=str(at_step(straight(method), step)), save_steps=2, keep_last_n=1)
        assert read_bits(folder) == wanted, step  # the log begins with the steps of the run it continues


def test_in_place_with_rotation(bench: Bench, straight: Any) -> None:
    """Each step is in the log once, whatever was logged after the checkpoint before the kill."""
    folder = copy_until(straight("lora"), bench.home / "in-place", step=3)
    run(bench, "lora", folder, resume="auto", keep_last_n=2)
    assert read_bits(folder) == read_bits(straight("lora"))
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in checkpoint_folders(folder / "checkpoints")] == [5, 4]
    events = [event["kind"] for event in read_jsonl(folder / "events.jsonl")]
    assert events.count("start") == 2
    assert "resumed" in events


def test_in_place_from_an_older_one_sets_the_later_aside(bench: Bench, straight: Any) -> None:
    folder = copy_until(straight("lora"), bench.home / "older", step=4)
    run(bench, "lora", folder, resume=str(at_step(folder, 2)))
    assert read_bits(folder) == read_bits(straight("lora"))
    aside = sorted(path.name for path in (folder / "checkpoints").glob("*~*"))
    assert aside == ["step-00000003~1", "step-00000004~1"]


def test_resume_names_a_run_and_takes_its_options(bench: Bench, straight: Any) -> None:
    folder = copy_until(straight("lora"), bench.home / "by-path", step=3)
    train(make_config(resume=str(folder), name="by-path", output_dir=str(bench.home)))
    assert read_bits(folder) == read_bits(straight("lora"))


@pytest.mark.parametrize("packing", [False, True])
def test_two_weighted_sources(bench: Bench, packing: bool) -> None:
    """The rows of a mixture follow from the step, also over the end of a source that is read several times."""
    other = bench.home / "few.jsonl"
    other.write_text(
        "".join(json.dumps({"prompt": f"p {n}", "completion": f"c {n}"}) + "\n" for n in range(3))
    )
    more = {"dataset": f"{bench.data}:0.4,{other}:0.6", "packing": packing}
    folder = bench.home / f"mixed-{packing}"
    run(bench, "lora", folder, **more)
    wanted = read_bits(folder)
    target = bench.home / f"mixed-{packing}-resumed"
    run(bench, "lora", target, resume=str(at_step(folder, 2)), **more)
    assert read_bits(target) == wanted
    with pytest.raises(UserError, match=r"mixture: 0\.4 from"):
        changed = more | {"dataset": f"{bench.data}:0.5,{other}:0.5"}
        run(bench, "lora", bench.home / f"changed-{packing}", resume=str(at_step(folder, 1)), **changed)


def test_saving_changes_nothing(bench: Bench, straight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the training, while it waits, or not at all: the same numbers."""
    wanted = read_bits(straight("lora"))
    monkeypatch.setattr(save, "SNAPSHOT_SHARE", 0.0)
    run(bench, "lora", bench.home / "waiting")
    assert read_bits(bench.home / "waiting") == wanted
    run(bench, "lora", bench.home / "unsaved", save_steps=0)
    rows = read_jsonl(bench.home / "unsaved" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in wanted["steps"]]


def test_evaluations_do_not_disturb_it(bench: Bench) -> None:
    """Evaluations before, during and after; those that were made come along in the checkpoint."""
    options = {"skip_eval": False, "eval_samples": 4, "num_samples": 1, "max_new_tokens": 2, "eval_steps": 2}
    whole = bench.home / "evaluated"
    run(bench, "lora", whole, **options)
    folder = copy_until(whole, bench.home / "evaluated-again", step=3)
    result = run(bench, "lora", folder, resume="auto", **options)
    assert read_bits(folder) == read_bits(whole)
    summary = json.loads((whole / "summary.json").read_text())
    assert result.summary["eval_after"] == summary["eval_after"]
    assert result.summary["eval_before"] == summary["eval_before"]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("data", {"dataset": "{home}/other.jsonl"}, "dataset"),
        ("model", {"model_name": "{home}/other-model"}, "other-model"),
        ("trainable", {"lora_rank": 3}, "lora_rank: 2 in the checkpoint, 3 now"),
        ("order", {"seed": 7}, "seed: 42 in the checkpoint, 7 now"),
        ("quantization", {"train_type": "qlora", "quantization_backend": "bnb"}, "quantization"),
        ("optimizer", {"optimizer": "sgd"}, "optimizer: adamw in the checkpoint, sgd now"),
    ],
)
def test_another_training_is_refused_unless_allowed(
    bench: Bench, straight: Any, kind: str, change: dict[str, Any], words: str
) -> None:
    home = bench.home
    if not (home / "other.jsonl").exists():
        write_chats(home / "other.jsonl", word="list")
        tiny_model(
            home / "other-model",
            seed=9,
            hidden=32,
            intermediate=64,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
        )
    change = {name: v.format(home=home) if isinstance(v, str) else v for name, v in change.items()}
    asked = {"resume": str(at_step(straight("lora"), 3)), **change}
    folder = home / f"mismatch-{kind}-{'-'.join(change)}"
    with pytest.raises(UserError, match="does not match the checkpoint") as error:
        run(bench, "lora", folder, **asked)
    assert words in error.value.why
    advice = "a different --name" if "lora_rank" in change else f"--allow_mismatch {kind}"
    assert advice in error.value.do
    assert not folder.exists()
    observer = Listener()
    if "lora_rank" in change:
        with pytest.raises(UserError, match="has no weights for this run"):
            run(bench, "lora", folder, **asked, allow_mismatch=kind, observer=observer)
        return
    result = run(bench, "lora", folder, **asked, allow_mismatch=kind, observer=observer)
    assert result.summary["status"] == "finished"
    (resumed,) = [event for event in observer.events if isinstance(event, Resumed)]
    assert resumed.allowed_differences
    sentences = (*resumed.allowed_differences, *resumed.changed_options)
    assert any(words.split(":")[0] in sentence for sentence in sentences)


def test_auto_passes_over_damaged_ones_and_says_so(bench: Bench, straight: Any) -> None:
    folder = copy_until(straight("lora"), bench.home / "damaged", step=4)
    damage(weights_file(folder))
    (at_step(folder, 3) / "manifest.sha256").unlink()
    observer = Listener()
    run(bench, "lora", folder, resume="auto", observer=observer)
    assert read_bits(folder) == read_bits(straight("lora"))
    skipped = [message for message in observer.warnings() if message.startswith("skipped: ")]
    assert ["step-00000004" in skipped[0], "step-00000003" in skipped[1], len(skipped)] == [True, True, 2]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(bench: Bench, straight: Any) -> None:
    folder = copy_until(straight("lora"), bench.home / "hopeless", step=1)
    damage(weights_file(folder))
    with pytest.raises(UserError, match="None of the 1 checkpoints"):
        run(bench, "lora", folder, resume="auto")
    assert len(read_jsonl(folder / "metrics.jsonl")) == 2


def test_a_finished_run_is_left_as_it_is_and_can_be_made_longer(bench: Bench, straight: Any) -> None:
    folder = bench.home / "longer"
    shutil.copytree(straight("lora"), folder, symlinks=True)
    before = (folder / "events.jsonl").read_bytes()
    assert run(bench, "lora", folder, resume="auto").summary["already_finished"]
    assert (folder / "events.jsonl").read_bytes() == before
    result = run(bench, "lora", folder, resume="auto", max_steps=NUM_STEPS + 2)
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(1, NUM_STEPS + 3))
    assert result.summary["steps"] == NUM_STEPS + 2


def test_an_extended_run_keeps_the_evaluation_of_its_former_end(bench: Bench) -> None:
    """It may have the best weights."""
    folder, asked = bench.home / "extended-evaluated", {"skip_eval": False, "num_samples": 0}
    before = run(bench, "lora", folder, **asked).summary["evaluations"]
    assert before.keys() == {"0", str(NUM_STEPS)}
    asked |= {"resume": "auto", "lr": 100.0, "max_steps": NUM_STEPS + 2}
    result = run(bench, "lora", folder, **asked).summary
    assert result["evaluations"].keys() == before.keys() | {str(NUM_STEPS + 2)}
    assert before.items() <= result["evaluations"].items()
    assert result["best"]["step"] == result["result_step"] == NUM_STEPS


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_jsonl(folder / "metrics.jsonl")]


def test_a_longer_run_says_what_becomes_of_the_learning_rate(bench: Bench, straight: Any) -> None:
    longer, told, before = NUM_STEPS + 4, {}, rates(straight("lora"))
    for choice in ("stretch", "constant", "restart"):
        folder, listener = bench.home / f"longer-{choice}", Listener()
        shutil.copytree(straight("lora"), folder, symlinks=True)
        chosen = {} if choice == "stretch" else {"on_extend": choice}
        run(bench, "lora", folder, resume="auto", max_steps=longer, observer=listener, **chosen)
        assert rates(folder)[:NUM_STEPS] == before
        [told[choice]] = [words for words in listener.warnings() if "learning rate" in words]
    after = {choice: rates(bench.home / f"longer-{choice}")[NUM_STEPS:] for choice in told}
    assert after["constant"] == [before[-1]] * 4
    lr = make_config(**bench.options("lora", bench.home)).lr
    whole = [
        learning_rate(s, peak=lr, schedule="cosine", num_steps=longer, warmup=1, floor_ratio=0.1)
        for s in range(longer)
    ]
    assert after["stretch"] == whole[NUM_STEPS:]
    assert after["restart"] == [
        learning_rate(s, peak=lr, schedule="cosine", num_steps=4, warmup=0, floor_ratio=0.1) for s in range(4)
    ]
    assert f"goes from {before[-1]:.3g} to {whole[NUM_STEPS]:.3g} at step 6" in told["stretch"]
    assert "--on_extend constant" in told["stretch"] and "--on_extend" not in told["restart"]
    assert told["constant"].endswith(f"stays at {before[-1]:.3g}")


@pytest.mark.parametrize("choice", ["constant", "restart"])
def test_an_extended_run_that_is_resumed_keeps_its_learning_rate(
    bench: Bench, straight: Any, choice: str
) -> None:
    """Bit for bit, without --on_extend again, and a second extension starts from the first."""
    folder, longer, again = bench.home / f"kept-{choice}", NUM_STEPS + 4, Listener()
    shutil.copytree(straight("lora"), folder, symlinks=True)
    run(bench, "lora", folder, resume="auto", max_steps=longer, on_extend=choice)
    rest = read_jsonl(folder / "metrics.jsonl")[NUM_STEPS + 2 :]
    path = folder / "checkpoints" / f"step-{NUM_STEPS + 2:08d}"
    run(bench, "lora", folder, resume=str(path), max_steps=longer, observer=again)
    repeated = read_jsonl(folder / "metrics.jsonl")[NUM_STEPS + 2 :]
    assert [(row["loss"], row["lr"]) for row in repeated] == [(row["loss"], row["lr"]) for row in rest]
    assert not [words for words in again.warnings() if "learning rate" in words]
    run(bench, "lora", folder, resume="auto", max_steps=longer + 1, on_extend="constant")
    assert rates(folder)[-1] == rates(folder)[-2]


def test_on_extend_without_more_steps_is_told(bench: Bench, straight: Any) -> None:
    folder, listener = bench.home / "no-longer", Listener()
    copy_until(straight("lora"), folder, step=3)
    run(bench, "lora", folder, resume="auto", on_extend="constant", observer=listener)
    assert [words for words in listener.warnings() if "on_extend has no effect" in words]
    assert rates(folder) == rates(straight("lora"))


def test_the_same_line_begins_anew_what_was_killed_before_its_first_checkpoint(bench: Bench) -> None:
    folder = bench.home / "early"
    run(bench, "lora", folder, save_steps=0, save_minutes=0)
    with pytest.raises(UserError, match="finished run without a checkpoint"):
        run(bench, "lora", folder, resume="auto")
    (folder / "summary.json").unlink()  # as a kill leaves it
    run(bench, "lora", folder, resume="auto", save_steps=0)
    assert (bench.home / "early~1" / "metrics.jsonl").is_file()
    assert [step for step, _ in checkpoint_folders(folder / "checkpoints")] == [NUM_STEPS]
    before = (folder / "metrics.jsonl").read_bytes()
    run(bench, "lora", folder, resume="auto", save_steps=0)  # finished: nothing is done again
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert not (bench.home / "early~2").exists()


def test_the_same_line_begins_anew_what_could_not_save_its_only_checkpoint(bench: Bench) -> None:
    """As the error says, although the training was finished."""
    folder, whole = bench.home / "unwritten", bench.home / "saved"
    run(bench, "full", whole, save_steps=NUM_STEPS)
    largest = max(path.stat().st_size for path in at_step(whole, NUM_STEPS).iterdir())
    with file_limit(largest - 1):
        failed = run(bench, "full", folder, save_steps=NUM_STEPS)
    assert isinstance(failed.failure, SaveFailed) and "--resume auto" in failed.failure.do
    assert read_json(folder / "summary.json")["status"] == "failed"
    run(bench, "full", folder, resume="auto", save_steps=NUM_STEPS)
    assert (bench.home / "unwritten~1" / "metrics.jsonl").is_file()
    assert [step for step, _ in checkpoint_folders(folder / "checkpoints")] == [NUM_STEPS]


def test_a_copied_run_goes_on_under_its_own_name(bench: Bench, straight: Any, tmp_path: Path) -> None:
    """Not under the name that it had where it was copied from."""
    copied = tmp_path / "copied"
    shutil.copytree(straight("lora"), copied, symlinks=True)
    assert choose_folder(make_config(resume=str(copied))) == copied
    for asked in (copied, at_step(copied, NUM_STEPS - 1)):
        elsewhere = make_config(resume=str(asked), output_dir=str(tmp_path / "elsewhere"))
        assert choose_folder(elsewhere) == tmp_path / "elsewhere" / "copied"


def test_a_resumed_run_keeps_its_command_and_its_requested_options(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = bench.options("lora", folder) | {"max_steps": 2, "save_steps": 1}
    train(make_config(**options), observers=[], command=["crosstune", "train", "--first"])
    first = load_run(folder)
    again = make_config(resume=str(folder), max_steps=4, overwrite=False)
    for more in (
        [],
        ["--max_steps", "5"],
    ):  # what a resume adds must not be taken for a request by the next one
        train(again, observers=[], command=["crosstune", "train", "--resume", "run", *more])
        again = make_config(resume=str(folder), max_steps=5)
    resumed = load_run(folder)
    assert resumed.plan["command"] == ["crosstune", "train", "--first"]
    assert reproduce_command(resumed).replace(" \\\n ", "").splitlines() == [
        "crosstune train --first", "crosstune train --resume run --max_steps 5",
    ]  # fmt: skip
    assert resumed.asked.keys() == first.asked.keys() and resumed.asked["max_steps"] == 5
    marks = {tuple((mark.at, mark.label) for mark in chart.marks)[:2] for chart in run_charts(resumed)}
    assert marks == {((2.0, "resumed"), (4.0, "resumed"))}
