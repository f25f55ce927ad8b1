"""The engines of `crosstune serve`: which is chosen, its command line, and what is said when it cannot serve."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.results.trained_folder import Trained
from crosstune.serve import prepare
from crosstune.serve.engines import ENGINES, Launch, choose_engine, takes_adapter


def launch(**changes: Any) -> Launch:
    settings = {
        "name": "demo",
        "path": Path("/models/base"),
        "port": 4000,
        "api_key": "secret",
        "num_slots": 4,
    }
    return Launch(**settings | {"context_length": 2048, "num_threads": 2} | changes)


def pairs(words: Any) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def test_vllm_serves_an_adapter_beside_its_base() -> None:
    made = ENGINES["vllm"].command(launch(adapter=Path("/runs/demo/adapter"), rank=24, num_models=2))
    assert made.module == "vllm.entrypoints.openai.api_server" and made.model == "demo"
    assert pairs(made.words) >= {
        ("--model", "/models/base"),
        ("--served-model-name", "demo-base"),
        ("--lora-modules", "demo=/runs/demo/adapter"),
        ("--max-lora-rank", "32"),
        ("--host", "127.0.0.1"),
        ("--port", "4000"),
        ("--max-model-len", "2048"),
        ("--gpu-memory-utilization", "0.45"),
    }
    assert "--enable-lora" in made.words and "secret" not in " ".join(made.words)
    assert made.environment == {"VLLM_API_KEY": "secret"}


def test_the_other_command_lines_listen_on_loopback() -> None:
    for name in ("vllm", "mlx", "transformers"):
        made = ENGINES[name].command(launch())
        assert pairs(made.words) >= {("--host", "127.0.0.1"), ("--port", "4000")}
        assert "/models/base" in made.words and "--trust-remote-code" not in made.words
        assert "--enable-lora" not in made.words


@pytest.mark.parametrize(
    ("settings", "record", "engine", "takes"),
    [
        ({"r": 16}, {}, "vllm", True),
        ({"r": 16}, {}, "llamacpp", False),
        ({"r": 16, "use_dora": True}, {}, "vllm", False),
        ({"r": 16, "modules_to_save": ["lm_head"]}, {}, "vllm", False),
        ({"r": 1024}, {}, "vllm", False),
        ({"r": 16}, {"add_tokens": "<a>"}, "vllm", False),
    ],
)
def test_vllm_takes_plain_adapters_and_the_others_are_merged(
    settings: dict[str, Any], record: dict[str, Any], engine: str, takes: bool
) -> None:
    trained = Trained(base="b", home=None, adapter=Path("a"), settings=settings, record=record)
    assert takes_adapter(engine, trained) is takes


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in ("vllm", "xllamacpp") else found(name, *rest),
    )
    for name, install in (("vllm", "pip install vllm"), ("auto", "pip install 'crosstune[llamacpp]'")):
        with pytest.raises(UserError, match="is not installed") as caught:
            choose_engine(name, ["model"])
        assert install in caught.value.do
    with pytest.raises(UserError, match="does not serve a GGUF file"):
        choose_engine("mlx", ["model.gguf"])


def test_a_file_larger_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "large.gguf").write_bytes(bytes(2000))
    monkeypatch.setattr(prepare, "memory_bytes", lambda: (4096, 2048))
    assert main(["serve", str(tmp_path / "large.gguf"), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "does not fit into the memory" in said and "q8_0" in said
    assert main(["serve", str(tmp_path / "none.gguf"), "--port", "0"]) == 2
    assert "There is no file" in capsys.readouterr().err
