"""Judges on both engines: the loss of divided labels, label probabilities, shared prefixes, learning, a scalar head."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import train_step
from tracked import RECORDING, notes, planted

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.data.batches.token_batch import IGNORED
from crosstune.files.journal import Journal
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.examples import common_length
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge
from crosstune.recipes.judge.open_splits import open_judge_data
from crosstune.recipes.judge.recipe import JudgeRecipe
from crosstune.recipes.judge.verdicts import JudgeSettings
from crosstune.results.judge import ask
from crosstune.runs.judges import JudgeRequest, open_judge, run_config
from crosstune.runs.open_parts import find_model, open_session

ENGINES = {"torch": "cpu", "mlx": "mlx"}
WORDS = {"good": 9.0, "fine": 6.0, "poor": 3.0, "bad": 0.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers whose score is in their words: easy to learn, for a model of a few layers."""
    folder = tmp_path_factory.mktemp("judge_data")
    draw = np.random.default_rng(0)
    for split, count in (("train", 96), ("val", 24), ("test", 24)):
        rows = []
        for number in range(count):
            word = draw.choice(list(WORDS))
            row = {"id": f"{split}{number}", "task": f"write {split} {number}", "answer": f"a {word} text"}
            rows.append(row | {"score": float(np.clip(WORDS[word] + draw.uniform(0, 1), 0, 10))})
        (folder / f"judge_{split}.json").write_text(json.dumps(rows))
    return folder


def options(model: Path, data: Path, backend: str, **more: Any) -> dict[str, Any]:
    shared = {
        "recipe": "judge",
        "model_name": str(model),
        "dataset": str(data),
        "backend": backend,
        "precision": "fp32",
    }
    shared |= {"train_type": "lora", "lora_target_modules": "all", "lora_dropout": 0.0, "batch_size": 4}
    return shared | {"gradient_accumulation_steps": 1, "max_steps": 4, "num_samples": 0, "lr": 1e-2} | more


def open_parts(model: Path, data: Path, backend: str, **more: Any) -> tuple[JudgeRecipe, Any]:
    plan = make_plan(make_config(**options(model, data, backend, **more)))
    recipe = JudgeRecipe(plan.config, model_folder=model)
    found = find_model(plan.config, Observers())
    return recipe, open_session(plan, found, task=recipe.task(plan.engine))


Opened = tuple[JudgeRecipe, Any]


@pytest.fixture(scope="module", params=ENGINES)
def opened(request: pytest.FixtureRequest, tiny_model: Path, data: Path) -> Opened:
    """A recipe and a session that no test trains."""
    return open_parts(tiny_model, data, ENGINES[request.param])


def judge_of(opened: Opened, verdict: str, **more: Any) -> Judge:
    recipe, session = opened
    settings = JudgeSettings(verdict=verdict, scale="0-10")
    return Judge(session=session, tokenizer=recipe.tokenizer, settings=settings, **more)


@pytest.mark.parametrize("verdict", ["digit", "score"])
def test_the_loss_is_the_cross_entropy_to_divided_labels(
    opened: Opened, tiny_model: Path, data: Path, verdict: str
) -> None:
    config = make_config(**options(tiny_model, data, "cpu", verdict=verdict))
    batch, session = JudgeRecipe(config, model_folder=tiny_model).micro_batches(0)[0], opened[1]
    assert (batch.shares > 0).sum() == 4, "every row has a divided label"
    expected = 0.0
    for row in range(4):
        logits = session.logits([batch.input_ids[row].tolist()])[0].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for place in np.flatnonzero(batch.targets[row] != IGNORED):
            share = float(batch.shares[row, place])
            expected -= (1 - share) * log_probs[place, batch.targets[row, place]]
            expected -= share * log_probs[place, batch.others[row, place]]
    assert session.evaluate([batch]).loss == pytest.approx(expected / batch.weight, rel=1e-5)
    assert batch.weight == (batch.targets != IGNORED).sum()


def test_only_the_verdict_and_its_end_carry_loss(tiny_model: Path, data: Path) -> None:
    config = make_config(**options(tiny_model, data, "cpu"))
    recipe = JudgeRecipe(config, model_folder=tiny_model)
    example = recipe.train.corpus[0]
    taught = example.tokens[example.supervised].tolist()
    assert len(taught) == 2 and taught[-1] in recipe.tokenizer.stop_ids
    assert recipe.tokenizer.decode(taught[:1]) in "0123456789"
    hard = JudgeRecipe(replace(config, soft_scores=False), model_folder=tiny_model)
    assert not hard.micro_batches(0)[0].shares.any()


def test_both_engines_take_the_same_steps(tiny_model: Path, data: Path) -> None:
    losses = {}
    for engine, backend in ENGINES.items():
        recipe, session = open_parts(tiny_model, data, backend, verdict="score")
        losses[engine] = [train_step(session, recipe.micro_batches(step), lr=5e-3).loss for step in range(3)]
    assert losses["mlx"] == pytest.approx(losses["torch"], rel=2e-4)
    assert losses["torch"][2] < losses["torch"][0]


def test_balanced_sampling_draws_every_score_equally(tiny_model: Path, data: Path) -> None:
    asked = options(tiny_model, data, "cpu", balance_scores=True, num_epochs=1, max_steps=-1)
    recipe = JudgeRecipe(make_config(**asked), model_folder=tiny_model)
    labels = np.array([recipe.verdict.label_of(item) for item in recipe.train.items])
    place_of = {row: place for place, row in enumerate(recipe.train.corpus.rows().tolist())}
    places = [place_of[row] for step in range(recipe.num_steps()) for row in recipe.rows(step)]
    counts = np.unique(labels[places], return_counts=True)[1]
    plain = np.unique(labels, return_counts=True)[1]
    assert counts.max() - counts.min() <= 1 < plain.max() - plain.min()
    assert len(places) == len(recipe.train)


def brute_force(judge: Judge, item: Item) -> np.ndarray:
    """The probability of each label from all logits of the prompt and the label."""
    [prompt], tokens = judge.prompts([item]), judge.tokens
    found = []
    for sequence in tokens.sequences:
        logits = judge.session.logits([[*prompt, *sequence]])[0].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total = 0.0
        for length, token in enumerate(sequence):
            if sequence[:length] in tokens.paths:
                total += log_probs[len(prompt) + length - 1, token]
        found.append(total)
    return np.exp(found) / np.exp(found).sum()


def items(count: int, *, rubric: str = "") -> list[Item]:
    return [
        Item(
            id=str(n),
            group=str(n),
            task=f"write {n} words{' please' * (n % 3)}",
            answers=("a good text",),
            rubric=rubric,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("verdict", ["digit", "score", "json"])
def test_label_probabilities_are_those_of_all_logits(opened: Opened, verdict: str) -> None:
    judge = judge_of(opened, verdict)
    if verdict != "digit":
        assert len(judge.tokens.paths) >= 2, "10 begins like 1, and they are told apart later"
    judged = judge.judge(items(2))
    found = np.array([one.probabilities for one in judged])
    for row, one in enumerate(items(2)):
        assert found[row] == pytest.approx(brute_force(judge, one), abs=1e-6)
    values = np.array(judge.verdict.labels.values)
    assert [one.score for one in judged] == pytest.approx((found @ values).tolist())
    assert all(0 < one.confidence <= 1 for one in judged)


def test_a_score_moves_little_with_the_batch_and_the_shared_prefix(opened: Opened) -> None:
    """docs/judge.md: by at most 1e-4 of the scale, here 0 to 10."""
    rubric = "Ten points are for a text that says exactly what was asked, and nothing else."
    asked = [*items(9, rubric=rubric), *items(3, rubric="Count the words.")]
    judge = replace(judge_of(opened, "score"), batch_size=8)
    assert common_length(judge.prompts(asked)[:9]) > 20
    wanted = [one.score for one in judge.judge(asked)]
    for way in ({"batch_size": 1}, {"share_prefixes": False}, {"batch_size": 1, "share_prefixes": False}):
        found = [one.score for one in replace(judge, **way).judge(asked)]
        assert found == pytest.approx(wanted, rel=0, abs=1e-4 * 10), way


@pytest.mark.parametrize("by", ["probabilities", "generation"])
def test_a_prompt_beyond_the_context_is_not_judged_and_counted(opened: Opened, by: str) -> None:
    asked = items(3)
    asked[1] = replace(asked[1], answers=("word " * 300,))
    judge = judge_of(opened, "digit")
    longest = max(len(prompt) for place, prompt in enumerate(judge.prompts(asked)) if place != 1)
    short = replace(judge, max_tokens=longest + 1)
    seen: list[Any] = []
    observer = SimpleNamespace(on_event=seen.append)
    with Journal(None, {}, say=print) as journal:
        request = JudgeRequest(target="x", by=by, max_new_tokens=2)
        found = ask(short, asked, request, observer, journal=journal)
    assert [one.too_long for one in found] == [False, True, False] and not found[1].is_parsed
    assert (
        f"1 of 3 items exceed the model's context of {longest + 1} tokens: '{asked[1].id}';"
        in seen[-1].message
    )
    if by == "probabilities":
        whole = judge.judge(asked)
        assert [found[0].score, found[2].score] == pytest.approx([whole[0].score, whole[2].score], abs=1e-5)
        assert replace(judge, max_tokens=5).judge(asked)[0].too_long, "nothing fits"


@dataclass(frozen=True, kw_only=True)
class Longer(Judge):
    """A judge whose tokens depend on the order of the answers, as where a full stop and a new line are one token."""

    first: str

    def prompts(self, items: Sequence[Item]) -> list[list[int]]:
        prompts = super().prompts(items)
        return [
            tokens[:1] * (item.answers[0] == self.first) + tokens
            for item, tokens in zip(items, prompts, strict=True)
        ]


def test_pairs_are_asked_in_both_orders(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"id": f"r{n}", "task": f"t {n}", "answer_a": "a good text", "answer_b": "a bad text", "winner": "A"}
        for n in range(30)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, session = open_parts(tiny_model, path, "cpu")
    judge = recipe.judge(session)
    asked = list(recipe.data.test)
    mirrored = [Item(**vars(one) | {"answers": one.answers[::-1]}) for one in asked]
    for one, other in zip(judge.judge(asked), judge.judge(mirrored), strict=True):
        a, b, tie = other.probabilities
        assert one.probabilities == pytest.approx((b, a, tie), abs=1e-6), (
            "the order of the answers does not matter"
        )
        assert one.consistent is not None and one.winner in ("A", "B", "tie")
    [whole] = map(len, judge.prompts(asked[:1]))
    for first, by in itertools.product(asked[0].answers, ("probabilities", "generation")):
        tight = Longer(
            first=first,
            session=session,
            tokenizer=judge.tokenizer,
            settings=judge.settings,
            max_tokens=whole + max(map(len, judge.tokens.sequences)),
        )
        for one in tight.judge(asked[:1], by=by, max_new_tokens=4):
            assert one.too_long and not one.is_parsed and one.consistent is False
            assert one.confidence is None and not one.probabilities
    texts = judge.judge(asked, by="generation", max_new_tokens=4)
    assert all(one.winner is None or one.consistent is not None for one in texts)


def words_of(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() if name != "recipe" for word in (f"--{name}", str(value))]


def test_a_judge_learns_and_beats_every_baseline(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = options(tiny_model, data, "cpu", train_type="full", lr=3e-3, max_steps=75, batch_size=8)
    flags |= {"output_dir": str(tmp_path), "name": "j", "num_samples": 2}
    with planted(tmp_path / "planted", notes=RECORDING):
        assert main(["judge", "train", *words_of(flags), "--log_to", "notes", "--json"]) == 0
    test = json.loads(capsys.readouterr().out)["test"]
    assert test["metrics"]["pearson"] > 0.9 and test["num_unreadable"] == 0
    *_, evaluated, tested, worst, _ = notes(tmp_path / "j")
    assert evaluated["name"] == "eval/samples" and worst["name"] == "test/worst"
    assert tested["values"]["test/pearson"] == test["metrics"]["pearson"] and tested["step"] == 75
    report = json.loads((tmp_path / "j" / "test_metrics.json").read_text())
    assert set(report["baselines"]) == {"constant", "longer answer", "untrained model"}
    for name, other in report["baselines"].items():
        assert report["metrics"]["mae"] < 0.7 * other["metrics"]["mae"], name
    rows = json.loads((tmp_path / "j" / "test_predictions.json").read_text())
    assert len(rows) == 24 and {"id", "expected", "predicted", "confidence"} <= rows[0].keys()
    page = (tmp_path / "j" / "report.html").read_text()
    assert "Worst disagreements" in page and "Calibration" in page and page.count('class="plot"') >= 3
    (tmp_path / "new.jsonl").write_text(
        '{"task": "write", "answer": "a good text"}\n{"task": "write", "answer": "a bad text"}\n'
    )
    out = tmp_path / "verdicts.jsonl"
    words = f"judge predict {tmp_path}/j --input {tmp_path}/new.jsonl --output {out} --backend cpu"
    assert main(words.split()) == 0
    good, bad = (json.loads(row)["predicted"] for row in out.read_text().splitlines())
    assert good > bad + 4
    recipe = JudgeRecipe(make_config(**flags), model_folder=tiny_model)
    asked = list(recipe.data.test)
    request = JudgeRequest(target=str(tmp_path / "j"), backend="cpu")
    judge = open_judge(request, items=asked, config=recipe.config, observer=Observers())
    likeliest = [judge.verdict.labels.values[np.argmax(one.probabilities)] for one in judge.judge(asked)]
    written = [one.score for one in judge.judge(asked, by="generation", max_new_tokens=8)]
    assert written == likeliest, "a judge writes the label that it finds most probable"
    capsys.readouterr()
    assert main(f"judge eval --predictions {tmp_path}/j/test_predictions.json --json".split()) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["metrics"]["pearson"] == pytest.approx(report["metrics"]["pearson"], abs=1e-9)


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_a_scalar_head_learns_and_is_transformers_sequence_classifier(
    tiny_model: Path, data: Path, tmp_path: Path, train_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    learns = train_type == "full"
    flags = options(tiny_model, data, "cpu", batch_size=8, head="scalar", train_type=train_type, lr=3e-3)
    flags |= {"output_dir": str(tmp_path), "name": "r", "max_steps": 40 if learns else 12}
    assert main(["judge", "train", *words_of(flags), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["test"]["metrics"]["pearson"]
    assert not learns or found > 0.9
    beside = json.loads((tmp_path / "r" / "test_metrics.json").read_text())["baselines"]
    assert 0 < beside["untrained model"]["metrics"]["mae"] < 10, "the base model, by its score tokens"
    recipe = JudgeRecipe(make_config(**flags), model_folder=tiny_model)
    request = JudgeRequest(target=str(tmp_path / "r"), backend="cpu")
    judge = open_judge(request, items=recipe.data.test, config=recipe.config, observer=Observers())
    ours = [one.score for one in judge.judge(recipe.data.test)]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "r" / "model").eval()
    prompts = judge.prompts(recipe.data.test)
    with torch.no_grad():
        theirs = [float(model(input_ids=torch.tensor([prompt])).logits[0, 0]) for prompt in prompts]
    assert ours == pytest.approx([min(10.0, max(0.0, 10 * value)) for value in theirs], abs=1e-4)
    assert any(0 < score < 10 for score in ours), "not all of them are cut to the scale"


def test_the_whole_test_split_is_judged_unless_limited(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    """A preset limits the evaluations during training, not the test."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan = make_plan(make_config(**options(tiny_model, data, "cpu")))
    assert plan.config.eval_samples == 200
    limited = {"options": plan.config.options() | {"eval_samples": 5}, "asked": plan.to_json()["asked"]}
    (folder / "plan.json").write_text(json.dumps(limited))
    config = run_config(folder)
    assert config is not None and len(open_judge_data(config).test) == 24
    limited["asked"]["eval_samples"] = 5
    (folder / "plan.json").write_text(json.dumps(limited))
    config = run_config(folder)
    assert config is not None and len(open_judge_data(config).test) == 5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"packing": True}, "--packing"),
        ({"train_on_prompt": True}, "--train_on_prompt"),
        ({"truncation": "cut"}, "--truncation cut"),
        ({"head": "scalar", "train_type": "dora"}, "--head scalar"),
        ({"verdict": "winner"}, "does not match the data"),
        ({"score_scale": "0-5"}, "outside the scale 0-5"),
    ],
)
def test_requests_that_a_judge_refuses(
    tiny_model: Path,
    data: Path,
    tmp_path: Path,
    asked: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = options(tiny_model, data, "cpu", output_dir=str(tmp_path), name="x") | asked
    assert main(["judge", "train", *words_of(flags)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
