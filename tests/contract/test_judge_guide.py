"""The command lines of the judge guide: through the entry files that `crosstune adopt` writes, to the plan of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import chat

from crosstune.cli import adopt
from crosstune.cli.main import main
from crosstune.machines.probe import load_machine

MPS, CUDA = "pt_app/eval_model/judge_train_mps.py", "pt_app/eval_model/judge_train_cuda.py"
QWEN_SMALL, QWEN = "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"

# entry, words, GB of the card (None: a Mac), what the plan must say
COMMANDS: list[tuple[str, str, float | None, dict[str, Any]]] = [
    (
        MPS,
        "--epochs 3",
        None,
        {"num_epochs": 3, "batch_size": 1, "model_name": QWEN_SMALL, "precision": "fp32"},
    ),
    (
        MPS,
        "--model meta-llama/Llama-3.2-1B-Instruct --epochs 2 --max_samples 50 --test_samples 20",
        None,
        {"model_name": "meta-llama/Llama-3.2-1B-Instruct", "dataset_samples": 50, "eval_samples": 20},
    ),
    (
        CUDA,
        "--epochs 3",
        12.0,
        {"train_type": "qlora", "batch_size": 2, "model_name": QWEN, "quant_type": "nf4"},
    ),
    (CUDA, "--epochs 3", 8.0, {"batch_size": 1, "gradient_accumulation_steps": 4, "train_type": "qlora"}),
    (CUDA, "--epochs 3", 16.0, {"train_type": "lora", "batch_size": 2}),
    (
        CUDA,
        "--model m/x --epochs 1 --batch_size 2 --gradient_accumulation 3 --lr 1e-5 --max_seq_length 256 --max_samples 9 "
        "--test_samples 5 --project_name judges --no_4bit",
        12.0,
        {"lr": 1e-5, "context_length": 256, "gradient_accumulation_steps": 3, "project_name": "judges"},
    ),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the guide has it, with data in the original shape."""
    folder = tmp_path / "datasets" / "judge_eval"
    folder.mkdir(parents=True)
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        rows = []
        for number in range(count):
            asked = f"Source: {split} {number}\nTranslation: x\nGive a 0-10 score."
            row = chat(asked, f"Score: {number}/10\nIssues: none\nFeedback: fine")
            rows.append({**row, "source": f"{split} {number}", "translation": "x"})
        (folder / f"judge_{split}.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def machine_file(folder: Path, gigabytes: float | None) -> str:
    """A Mac, or a machine with a card of this size."""
    if gigabytes is None:
        return "apple-m1-16gb"
    machine = load_machine("rtx-4090").to_json()
    machine["name"] = f"card of {gigabytes} GB"
    for device in machine["backends"]["cuda"]["devices"]:
        device |= {
            "memory_total_bytes": int(gigabytes * 1.07e9),
            "memory_free_bytes": int(gigabytes * 1.05e9),
        }
    path = folder / "machine.json"
    path.write_text(json.dumps(machine))
    return str(path)


@pytest.mark.parametrize(
    ("path", "words", "gigabytes", "expected"),
    COMMANDS,
    ids=[f"{c[0][-8:-3]} {c[1]} {c[2]}" for c in COMMANDS],
)
def test_every_command_of_the_guide_is_planned(
    project: Path,
    path: str,
    words: str,
    gigabytes: float | None,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = next(entry for entry in adopt.ENTRIES if entry.path == path)
    assert entry.command == ("judge", "train")
    monkeypatch.setattr(
        adopt, "_available", lambda backends: backends[0]
    )  # that of the planned machine, not of this one
    line = adopt.entry_words(entry, words.split())
    machine = machine_file(project, gigabytes)
    assert main(["plan", "--recipe", "judge", "--machine", machine, *line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    plan = plan.get("plan", plan)
    assert plan["backend"] == ("mps" if path == MPS else "cuda")
    assert {name: plan["options"][name] for name in expected} == expected
    assert plan["options"]["dataset"] == "datasets/judge_eval"
    assert plan["options"]["output_dir"] == "adapters_eval"


def test_adopted_files_run_and_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adopt", str(tmp_path)]) == 0
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")} == {
        MPS,
        CUDA,
        "train.py",
    }
    assert main(["adopt", str(tmp_path)]) == 0, "the same files may be written again"
    capsys.readouterr()
    done = subprocess.run(
        [sys.executable, str(tmp_path / MPS), "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "crosstune judge ACTION" in done.stdout and "--max_seq_length" in done.stdout
    (tmp_path / CUDA).write_text("print('mine')\n")
    assert main(["adopt", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err and (tmp_path / CUDA).read_text() == "print('mine')\n"
    assert main(["adopt", str(tmp_path), "--force"]) == 0
    assert "run_entry" in (tmp_path / CUDA).read_text()


def test_an_entry_says_that_its_device_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(entry for entry in adopt.ENTRIES if entry.path == CUDA)
    monkeypatch.setattr(adopt, "_available", lambda backends: "cpu")
    words = adopt.entry_words(entry, ["--epochs", "1"])
    assert words[words.index("--backend") + 1] == "cpu"
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and f"no {entry.backends[0].upper()} device found" in " ".join(
        said.split()
    )
    monkeypatch.setattr(adopt, "_available", lambda backends: backends[0])
    adopt.entry_words(entry, ["--epochs", "1"])
    adopt.entry_words(entry, ["--backend", "cpu"])
    assert capsys.readouterr().err == "", (
        "nothing is said where the device is there, or another one was asked for"
    )


def test_an_entry_names_its_run_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in adopt.ENTRIES if entry.path == CUDA)
    monkeypatch.setattr(adopt, "_available", lambda backends: backends[0])
    for asked, name in ((["--model", "org/Judge-1B"], "Judge-1B"), ([], Path(QWEN).name)):
        words = adopt.entry_words(entry, asked)
        assert words[words.index("--name") + 1] == name and "--overwrite" in words
    given = ["--backend", "cpu", "--output_dir", "x", "--name", "y"]
    assert adopt.entry_words(entry, given) == given


def test_peft_loads_the_final_folder_of_the_guide(
    project: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`PeftModel.from_pretrained(base_model, "./adapter_path")`, with the folder adapters_eval/*_final."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(adopt, "_available", lambda backends: "cpu")
    model = project / "org" / "Judge"
    model.parent.mkdir()
    model.symlink_to(tiny_model)
    line = ["--model", str(model), "--epochs", "1", "--max_samples", "2", "--skip_eval", "true"]
    (project / "adapters_eval" / "Judge_final").mkdir(parents=True)
    (project / "adapters_eval" / "Judge_final" / "mine.txt").write_text("x")
    assert adopt.run_entry("judge_train_mps", line) == 0
    [final] = (project / "adapters_eval").glob("*_final")
    assert (project / "adapters_eval" / "Judge_final~1" / "mine.txt").is_file(), "what was there is kept"
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(final))
    assert any("lora_A" in name for name, _ in loaded.named_parameters())
    assert (final / "judge.json").is_file() and (project / "adapters_eval" / "Judge" / "plan.json").is_file()
    said = capsys.readouterr().err
    assert "crosstune judge predict adapters_eval/Judge" in said and "crosstune chat" not in said
    (final / "old.txt").write_text("x")
    adopt._publish(project / "adapters_eval", "Judge")
    assert not (final / "old.txt").exists(), "the next run replaces its own result"
