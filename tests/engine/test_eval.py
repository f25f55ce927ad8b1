"""`crosstune eval`: tasks of local files on a run and its base, equal to the harness's own model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tuned_run

from crosstune.cli.main import main
from crosstune.files.journal import Journal
from crosstune.results import evaluate

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

CHOICE = """
task: colors
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" red", " green", " blue"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ANSWER = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{max_gen_toks: 6, until: ["\\n"]}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
WORDS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("eval")
    rows = [{"prompt": f"Color {n}?", "completion": WORDS[n % 3]} for n in range(24)]
    tasks = [{"question": f"Color {n}?", "label": n % 3, "answer": WORDS[n % 3]} for n in range(24)]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    for name, text in (("colors", CHOICE), ("words", ANSWER)):
        (home / f"{name}.yaml").write_text(text.format(data=home / "tasks.jsonl"))
    return tuned_run(home, tiny_model, rows, steps=40)


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[str, ...], dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", *words, "--backend", "cpu", "--precision", "fp32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    return {(row["side"], row["task"], row["metric"]): row for row in rows}


def test_both_sides_equal_the_harness_and_are_kept(
    run: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # everything is local
    tasks = f"{run.parent / 'colors.yaml'},{run.parent / 'words.yaml'}"
    found = evaluated(capsys, str(run), "--tasks", tasks, "--chat")
    from lm_eval.evaluator import evaluate as evaluate_tasks
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for side, adapter in (("before", None), ("after", str(run / "adapter"))):
        theirs = HFLM(
            pretrained=str(tiny_model),
            tokenizer=str(run / "adapter"),
            dtype="float32",
            device="cpu",
            peft=adapter,
        )
        loaded = TaskManager(include_defaults=False).load(tasks.split(","))
        for task in loaded["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        report = evaluate_tasks(lm=theirs, task_dict=loaded, apply_chat_template=True, bootstrap_iters=1000)
        assert report is not None
        for task, metric in (("colors", "acc"), ("words", "exact_match")):
            row, wanted = found[side, task, metric], report["results"][task]
            assert row["value"] == pytest.approx(wanted[f"{metric},none"])
            assert row["stderr"] == pytest.approx(wanted[f"{metric}_stderr,none"])
            assert row["num_samples"] == 24 and row["chat_template"] is True and row["num_fewshot"] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert 'id="benchmarks"' in page and "chat template, no examples, 24 rows" in page

    def never(*words: Any, **options: Any) -> Any:
        raise AssertionError("a kept result was computed again")

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "open_chat_model", never)
        assert evaluated(capsys, str(run), "--tasks", tasks, "--chat") == found
    plain = evaluated(
        capsys, str(run), "--tasks", str(run.parent / "colors.yaml"), "--num_fewshot", "2", "--limit", "6"
    )
    assert plain["after", "colors", "acc"]["num_fewshot"] == 2
    kept = json.loads((run / "benchmarks.json").read_text())["results"]
    assert len(kept) == len(found) + len(plain)
    assert "plain text, 2 examples, first 6 rows" in (run / "report.html").read_text(encoding="utf-8")


def test_what_cannot_be_evaluated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text(CHOICE.format(data=tmp_path / "absent.jsonl"))
    for task, reason in (
        (str(tmp_path / "none.yaml"), "There is no task file"),
        (str(tmp_path / "bad.yaml"), "cannot be evaluated"),
    ):
        assert main(["eval", str(run), "--tasks", task, "--backend", "cpu"]) == 2
        assert reason in capsys.readouterr().err


def test_a_task_whose_aliases_multiply_is_refused_at_once(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written out, it has more values than fit into any memory."""
    lines = ["task: many", "a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]" for p, n in zip("abcdefghijk", "bcdefghijkl", strict=True)
    ]
    (tmp_path / "many.yaml").write_text("\n".join(lines))
    assert main(["eval", str(tiny_model), "--tasks", str(tmp_path / "many.yaml"), "--backend", "cpu"]) == 2
    assert "aliases" in capsys.readouterr().err


def test_an_interrupted_task_continues_and_changed_rows_are_evaluated_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"Color {n}?", "label": n % 3, "answer": WORDS[n % 3]} for n in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("colors", CHOICE), ("words", ANSWER)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    words = ["--tasks", f"{tmp_path / 'colors.yaml'},{tmp_path / 'words.yaml'}", "--batch_size", "4"]
    plain, done = Journal.add, list[int]()

    def stop(journal: Journal, new: Any) -> None:
        plain(journal, new)
        done.append(1)
        if len(done) == 38:  # 36 requests of the first task, and two batches of the second
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", stop)
        assert main(["eval", str(run), *words, "--backend", "cpu", "--precision", "fp32"]) == 130
    [partial] = run.glob("benchmarks.json.*.partial")
    assert partial.read_bytes().count(b"\n") == 9
    capsys.readouterr()
    assert main(["eval", str(run), *words, "--backend", "cpu", "--precision", "fp32", "--json"]) == 0
    said = capsys.readouterr()
    assert "continues after 8 finished rows" in said.err and "examples/s" not in said.err
    assert not list(run.glob("*.partial"))
    (run / "benchmarks.json").unlink()
    found = evaluated(capsys, str(run), *words)
    assert [*found.values()] == json.loads(said.out)["results"], "the same without an interruption"
    data.write_text("".join(json.dumps({**row, "label": 0, "answer": "red"}) + "\n" for row in rows))
    again = evaluated(capsys, str(run), *words)
    assert again["after", "colors", "acc"] != found["after", "colors", "acc"]
    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "open_chat_model", None)
        assert evaluated(capsys, str(run), *words) == again
