"""The engines of `crosstune serve`: the choice, the command line, and the error if none can serve."""

from __future__ import annotations

import importlib.util
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.core.events import Event, StepMetrics
from crosstune.runs.trained_folder import Trained
from crosstune.serve import server
from crosstune.serve.engines import ENGINES, Launch, Prepared, choose_engine, takes_adapter


def launch(**changes: Any) -> Launch:
    settings: Any = {
        "port": 4000,
        "api_key": "secret",
        "num_slots": 4,
        "context_length": 2048,
        "num_threads": 2,
    }
    num_models = changes.pop("num_models", 1)
    model = Prepared(name="demo", path=Path("/models/base"), context=None, **changes)
    return Launch(model=model, num_models=num_models, **settings)


def pairs(words: Any) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def test_vllm_serves_an_adapter_beside_its_base() -> None:
    made = ENGINES["vllm"].command(launch(adapter=Path("/runs/demo/adapter"), rank=24, num_models=2))
    assert made.module == "vllm.entrypoints.cli.main" and made.model == "demo"
    assert pairs(made.words) >= {
        ("serve", "/models/base"),
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
    made = ENGINES["vllm"].command(launch(adapter=Path("/runs/lr=1,2"), rank=24))
    (module,) = (later for word, later in pairs(made.words) if word == "--lora-modules")
    assert json.loads(module) == {"name": "demo", "path": "/runs/lr=1,2"}


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
    (tmp_path / "large.gguf").write_bytes(header({}) + bytes(2000))
    monkeypatch.setattr(server, "memory_bytes", lambda: (4096, 2048))
    assert main(["serve", str(tmp_path / "large.gguf"), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "does not fit into the memory" in said and "q8_0" in said
    assert main(["serve", str(tmp_path / "none.gguf"), "--port", "0"]) == 2
    assert "it is missing" in capsys.readouterr().err


def header(facts: dict[str, str | int]) -> bytes:
    """Return a GGUF file without tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = [
        text(key) + (struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value))
        for key, value in facts.items()
    ]  # fmt: skip
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)


def test_the_header_of_a_file_says_its_context_and_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")

    class Kept:
        def on_event(self, event: Event) -> None:
            said.append(str(getattr(event, "message", event)))

        def on_step(self, metrics: StepMetrics) -> None: ...

    file, said, observer = tmp_path / "demo.gguf", list[str](), Kept()
    facts: dict[str, str | int] = {"general.architecture": "llama", "llama.context_length": 512}
    file.write_bytes(header(facts))
    assert server.prepare(str(file), "llamacpp", observer=observer).context == 512
    assert len(said) == 1 and "has no chat template" in said[0]
    file.write_bytes(header(facts | {"tokenizer.chat_template": "{{ messages }}"}))
    assert server.prepare(str(file), "llamacpp", observer=observer).context == 512 and len(said) == 1
    assert main(["serve", str(file), "--port", "0", "--context_length", "1024"]) == 2
    assert "the model has a context of 512 tokens" in capsys.readouterr().err
    file.write_bytes(header(facts)[:-3])
    assert main(["serve", str(file), "--port", "0"]) == 2
    assert "is not a complete GGUF file" in capsys.readouterr().err
