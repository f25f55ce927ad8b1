"""`crosstune plan` rejects the requests that `train` rejects, with the same errors, and lists unchecked parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusals(words: str, capsys: Captured) -> tuple[str, str]:
    """Return the messages of `plan` and `train` for the same request; both must exit with 2."""
    said = []
    for command in ("plan", "train"):
        assert main([command, *words.split()]) == 2, command
        said.append(
            "".join(
                line
                for line in capsys.readouterr().err.splitlines(keepends=True)
                if not line.endswith(" ...\n")
            )
        )
    return said[0], said[1]


def check_same(words: str, expected: str, capsys: Captured) -> None:
    by_plan, by_train = refusals(f"--backend cpu --max_steps 1 --output_dir out {words}", capsys)
    assert expected in by_plan
    assert by_plan in by_train
    assert not Path("out").exists(), "nothing is begun"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dataset nowhere.jsonl", "No dataset 'nowhere.jsonl'"),
        ("--dataset commands:0,alpaca:1", "The weight of commands in --dataset cannot be '0'"),
        ("--columns query=promt", "cannot map query to 'promt'"),
        ("--model_name ./nowhere", "There is no folder"),
        ("--lora_target_modules nothing_like_it", "matches no linear layer"),
        ("--train_type llama_pro --num_new_blocks 7", "cannot be spread evenly"),
        (
            "--train_type qlora --quantization_backend quanto --group_size 48",
            "--group_size 48 does not divide",
        ),
        ("--base_adapter nowhere", "nowhere"),
        ("--profile --profile_active_steps 0", "profile_active_steps cannot be 0"),
        ("--tokenizer nowhere", "There is no tokenizer folder nowhere"),
        (f"--output_dir {__file__}/deep/er --name run", f"Not a directory: {__file__}"),
    ],
)
def test_a_request_that_cannot_be_trained(
    words: str, expected: str, tiny_model: Path, capsys: Captured
) -> None:
    model = "" if "--model_name" in words else f"--model_name {tiny_model}"
    check_same(f"{model} {words}", expected, capsys)


def test_a_model_of_another_kind(tiny_model: Path, capsys: Captured) -> None:
    model = shutil.copytree(tiny_model, Path("vision"))
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    check_same(f"--model_name {model}", "transformers cannot load the model", capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("up_proj", "--backend mlx --train_type full"),
        ("k_proj", "--train_type qlora"),
        ("gptq", "--train_type lora"),
    ],
)
def test_weights_that_do_not_fit_their_configuration(
    change: str, words: str, tiny_model: Path, capsys: Captured
) -> None:
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(tiny_model, Path("changed"))
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    if change == "up_proj":  # it is missing
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif change == "k_proj":  # a row is missing
        name = "model.layers.0.self_attn.k_proj.weight"
        weights[name] = weights[name][:-1].copy()
    else:
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    by_plan, by_train = refusals(
        f"--backend cpu --max_steps 1 --output_dir out {words} --model_name {model}", capsys
    )
    assert change in by_plan.lower() and by_plan in by_train


def make_experts(tiny_model: Path, model: Path) -> Path:
    """A Mixtral of two experts, in the files of which every expert has tensors of its own."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    (model / "config.json").write_text(json.dumps(config))
    weights: dict[str, Any] = {}
    for name, array in load_file(model / "model.safetensors").items():
        layer, _, part = name.partition(".mlp.")
        word = {"gate_proj.weight": "w1", "down_proj.weight": "w2", "up_proj.weight": "w3"}.get(part)
        if word is None:
            weights[name] = array
            continue
        for expert in range(2):
            weights[f"{layer}.block_sparse_moe.experts.{expert}.{word}.weight"] = array
        weights[f"{layer}.block_sparse_moe.gate.weight"] = array[:2, :64].copy()
    save_file(weights, model / "model.safetensors")
    return model


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--train_type llama_pro", "llama_pro cannot add blocks to MixtralForCausalLM"),
        ("--backend mlx --train_type dora --lora_target_modules down_proj", "dora cannot adapt"),
        ("--backend mlx --init_lora orthogonal", "cannot start the adapter of"),
        ("--train_type dora --lora_target_modules down_proj", "dora cannot adapt"),
    ],
)
def test_requests_that_experts_cannot_meet(
    words: str, expected: str, tiny_model: Path, capsys: Captured
) -> None:
    model = make_experts(tiny_model, Path("experts"))
    check_same(f"--model_name {model} {words}", expected, capsys)


def test_a_row_that_cannot_be_read(write_jsonl: Any, tiny_model: Path, capsys: Captured) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 30 + [{"prompt": "a", "answer": "b"}]
    data = write_jsonl(rows)
    by_plan, by_train = refusals(f"--backend cpu --model_name {tiny_model} --dataset {data}", capsys)
    assert "line 31" in by_plan
    assert by_plan in by_train


def test_a_name_that_is_taken(tiny_model: Path, capsys: Captured) -> None:
    words = f"--backend cpu --model_name {tiny_model} --max_steps 1 --batch_size 1 --skip_eval --name run"
    assert main(["train", *words.split()]) == 0
    capsys.readouterr()
    by_plan, by_train = refusals(words, capsys)
    assert "already contains a run" in by_plan
    assert by_plan in by_train
    assert main(["plan", *words.split(), "--overwrite"]) == 0
    assert main(["plan", "--resume", "runs/run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.partition("{")[2].join(("{", "")))
    assert plan["options"]["batch_size"] == 1, "the options of the run that is continued"
    by_plan, by_train = refusals("--resume runs/run --max_steps 2 --lora_rank 3", capsys)
    assert "lora_rank: 16 in the checkpoint, 3 now" in by_plan
    assert by_plan in by_train


def test_what_cannot_be_known_here_is_said(capsys: Captured) -> None:
    words = (
        "--machine rtx-4090 --model_name /there/model --dataset /there/rows.jsonl --base_adapter /there/old"
    )
    assert main(["plan", *words.split(), "--json"]) == 0
    left = " ".join(json.loads(capsys.readouterr().out)["not_checked"])
    for name in ("/there/model", "/there/rows.jsonl", "/there/old"):
        assert name in left
    assert main(["plan", "--backend", "cpu", "--model_name", "some-org/not-here-7b"]) == 0
    assert "not checked  the model some-org/not-here-7b" in capsys.readouterr().out


def test_a_model_that_is_here_is_checked_without_a_word(
    tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2)
    for more in ([], ["--recipe", "preference", "--dataset", str(pairs), "--skip_eval"]):
        assert main(["plan", "--backend", "cpu", "--model_name", str(tiny_model), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["not_checked"] == []


@pytest.mark.parametrize(("packing", "steps"), [([], 7), (["--packing"], 1)])
def test_steps_and_lengths_of_local_data_without_the_model(
    packing: list[str], steps: int, write_jsonl: Any, capsys: Captured
) -> None:
    """Rows are counted without the model, and not taken to fill the context."""
    data = write_jsonl([{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(60)])
    words = ["plan", "--machine", "rtx-4090", "--model_name", "Qwen/Qwen3-8B", "--json", *packing]
    found = []
    for more in (["--dataset", str(data)], []):
        assert main([*words, "--batch_size", "2", "--gradient_accumulation_steps", "4", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["prediction"])
    assert found[0]["num_steps"] == steps and found[0]["hours"] is not None
    assert packing or found[0]["bytes_per_rank"] < 0.95 * found[1]["bytes_per_rank"]


def test_one_of_several_torch_processes(
    tiny_model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_same(f"--model_name {tiny_model}", "This process is rank 1 of 2", capsys)


def test_rows_are_rendered_with_the_given_template_in_every_format(
    tiny_model: Path, capsys: Captured
) -> None:
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text(json.dumps({"prompt": "one", "completion": "two"}))
    Path("rows/b.jsonl").write_text(json.dumps({"query": "bad", "reply": "two"}))
    Path("mine.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    words = f"--model_name {tiny_model} --dataset rows --chat_template mine.jinja"
    by_plan, _ = refusals(f"--backend cpu --max_steps 1 --output_dir out {words}", capsys)
    assert "b.jsonl" in by_plan
    assert "chat template mine.jinja" in by_plan
    assert "no bad words" in by_plan
    Path("mine.jinja").unlink()
    assert main(["plan", "--machine", "h200", *words.replace("mine", "./there").split()]) == 0
    assert "the chat template ./there.jinja" in capsys.readouterr().out
