"""New tokens against transformers and PEFT: the losses of a resized model, and the result in every other form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import check_result, check_resume, peft_losses, run_options
from safetensors.torch import load_file
from test_peft_parity import column
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.api.model import load
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.added_tokens import add_tokens
from crosstune.models.locate import locate
from crosstune.runs.pipeline import train

NEW = ["slowly", "please"]
LISTED = ",".join(NEW)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def resized(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The models with the tokens added by transformers: new rows are the mean of the others."""
    home = tmp_path_factory.mktemp("resized")
    for tied, folder in models.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        size = model.config.vocab_size
        assert len(tokenizer) == size, "no spare rows"
        tokenizer.add_tokens(NEW)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                weight[size:] = weight[:size].mean(dim=0)
        model.save_pretrained(home / str(tied))
        tokenizer.save_pretrained(home / str(tied))
    return {tied: home / str(tied) for tied in models}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_are_those_of_transformers_and_peft(
    models: dict[bool, Path], resized: dict[bool, Path], data_file: Path, tmp_path: Path, tied: bool
) -> None:
    both: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": tied}
    asked = run_options(models[tied], data_file, tmp_path, add_tokens=LISTED)
    run = train(make_config(**asked)).folder
    *expected, after = peft_losses(resized[tied], **both)
    assert column(run, "loss") == pytest.approx(expected, rel=1e-5)
    check_result(run, resized[tied], after=after)
    for folder in (run / "adapter", tmp_path / "merged"):
        assert AutoTokenizer.from_pretrained(folder).tokenize("slowly") == ["slowly"]
    if not tied:
        check_resume(tmp_path / "resumed", asked, run, backend="cpu")
        with pytest.raises(
            UserError, match=r"(?s)does not match the checkpoint.*add_tokens: slowly,please in"
        ):
            train(
                make_config(
                    **asked
                    | {
                        "add_tokens": "slowly",
                        "resume": "auto",
                        "output_dir": str(tmp_path / "resumed"),
                        "max_steps": 12,
                    }
                )
            )


def test_only_the_rows_of_new_tokens_change(models: dict[bool, Path], tmp_path: Path) -> None:
    for folder in (models[False], models[True]):
        found = add_tokens(locate(str(folder)), "<a>,<b>")
        old, new = (load_file(path / "model.safetensors") for path in (folder, found.path))
        for name, tensor in old.items():
            assert torch.equal(new[name][: len(tensor)], tensor)
            if len(new[name]) > len(tensor):
                assert torch.equal(new[name][-1], tensor.double().mean(0).to(tensor.dtype))
        assert len(new["model.embed_tokens.weight"]) == len(old["model.embed_tokens.weight"]) + 2
        tokenizer = Tokenizer.from_folder(found.path)
        assert tokenizer.decode(tokenizer.encode("x<a>y<b>").ids) == "x<a>y<b>"
        assert tokenizer.encode("<a><b>").ids == [tokenizer.rust.get_vocab_size() - n for n in (2, 1)]
        assert add_tokens(locate(str(folder)), "<a>,<b>") == found
    again = add_tokens(locate(str(found.path)), "<b>,<c>")
    assert again.kept_tokens == ("<b>",)
    assert Tokenizer.from_folder(again.path).encode("<c>").ids == [tokenizer.encode("<b>").ids[0] + 1]
    assert add_tokens(locate(str(found.path)), "<b>").path == found.path, "nothing is new"


def test_spare_rows_are_used_first(models: dict[bool, Path], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[False])
    model = AutoModelForCausalLM.from_pretrained(models[False], dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer) + 8)
    model.save_pretrained(tmp_path / "spare")
    tokenizer.save_pretrained(tmp_path / "spare")
    found, size = add_tokens(locate(str(tmp_path / "spare")), "<a>,<b>"), len(tokenizer)
    new = AutoModelForCausalLM.from_pretrained(found.path).get_input_embeddings().weight
    old = model.get_input_embeddings().weight
    assert new.shape == old.shape
    assert torch.equal(new[:size], old[:size]) and torch.equal(new[size + 2 :], old[size + 2 :])
    assert torch.equal(new[size], old[:size].double().mean(0).float())
    assert AutoTokenizer.from_pretrained(found.path).encode("<b>", add_special_tokens=False) == [size + 1]


def test_shards_without_embeddings_are_links(models: dict[bool, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[False], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    AutoTokenizer.from_pretrained(models[False]).save_pretrained(tmp_path / "sharded")
    found = add_tokens(locate(str(tmp_path / "sharded")), "<a>")
    files = list(found.path.glob("*.safetensors"))
    assert 0 < sum(not file.is_symlink() for file in files) <= 2 < len(files)
    longer = AutoModelForCausalLM.from_pretrained(found.path, dtype="auto")
    assert longer.config.vocab_size == model.config.vocab_size + 1
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(longer(ids).logits[..., :-1], model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_on_mlx_and_elsewhere(
    models: dict[bool, Path], resized: dict[bool, Path], data_file: Path, tmp_path: Path, tied: bool
) -> None:
    pytest.importorskip("mlx_lm")
    losses = {}
    for name in ("cpu", "mlx"):
        asked = run_options(models[tied], data_file, tmp_path / name, add_tokens=LISTED, backend=name)
        run = train(make_config(**asked)).folder
        losses[name] = column(run, "loss")
    assert losses["mlx"] == pytest.approx(losses["cpu"], rel=1e-5)
    check_result(run, resized[tied])
    check_resume(tmp_path / "resumed", asked, run, backend="mlx")
    moved = tmp_path / "moved.tar"
    assert main(["move", str(tmp_path / "resumed" / "run"), "--to", "cpu", "--out", str(moved)]) == 0
    words = [
        f"--{name}={value}" for name, value in {"backend": "cpu", "output_dir": tmp_path / "there"}.items()
    ]
    assert main(["train", "--resume", str(moved), "--max_steps", "12", *words]) == 0
    for form in ("mlx", "gguf"):
        out = tmp_path / f"for-{form}"
        assert main(["export", str(run), "--to", form, "--out", str(out)]) == 0
        source = next(out.glob("*.gguf")) if form == "gguf" else out
        shown = load(str(source), backend="cpu", progress=False)
        assert shown.logits([5, 6, 7]).shape[-1] == len(AutoTokenizer.from_pretrained(run / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_added_tokens_with_other_methods(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, train_type: str
) -> None:
    options = {"train_type": train_type, "precision": "bf16", "lr": 3e-4 if train_type == "full" else 3e-3}
    asked = run_options(models[False], data_file, tmp_path, add_tokens=LISTED, save_steps=5, **options)
    run = train(make_config(**asked)).folder
    column(run, "loss")
    opened = load(run, backend="cpu", progress=False)
    assert opened.logits([5, 6, 7]).shape[-1] == len(AutoTokenizer.from_pretrained(models[False])) + 2
    with pytest.raises(UserError, match=r"(?s)does not match the checkpoint.*add_tokens: slowly,please in"):
        train(make_config(**asked | {"add_tokens": "slowly", "resume": str(run), "max_steps": 12}))


def test_a_file_and_tokens_that_exist(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text("slowly\n\n<|im_end|>\n")
    config = make_config(**run_options(models[False], data_file, tmp_path, add_tokens=str(file), max_steps=1))
    known = next(iter(AutoTokenizer.from_pretrained(models[False]).get_added_vocab()))
    assert config.add_tokens == "slowly,<|im_end|>"
    file.write_text(f"slowly\n{known}\n")
    words = [f"--{name}={value}" for name, value in config.options_asked().items() if name != "add_tokens"]
    assert main(["train", *words, "--add_tokens", str(file)]) == 0
    assert f"adds no row for {known}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_tokens": "<a>,,<b>"}, "different tokens separated by commas"),
        ({"add_tokens": "<a>,<a>"}, "different tokens separated by commas"),
        ({"add_tokens": "missing.txt"}, "missing.txt"),
        ({"add_tokens": "<a>", "train_type": "llama_pro"}, "cannot be combined with llama_pro"),
        ({"add_tokens": "<a>", "tokenizer": "somewhere"}, "cannot be combined with --tokenizer"),
        (
            {"add_tokens": "<a>", "recipe": "latent_diffusion"},
            "does not apply to the latent_diffusion recipe",
        ),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(make_config(**run_options(models[False], data_file, tmp_path, **options)))
    assert not (tmp_path / "run").exists()


def test_quantized_embeddings_are_refused(models: dict[bool, Path], data_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    assert (
        main(["convert", str(models[False]), "--to", "mlx", "--n_bits", "4", "--out", str(tmp_path / "q")])
        == 0
    )
    asked = run_options(
        tmp_path / "q", data_file, tmp_path, add_tokens="<a>", backend="mlx", train_type="qlora"
    )
    with pytest.raises(UserError, match="quantized embeddings cannot be extended"):
        train(make_config(**asked))
