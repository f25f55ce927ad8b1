"""docs/internals/add-a-quantizer.md, followed: one new file in torch_engine/quant is planned, probed, accepted and trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import ConfigError
from crosstune.core.quantization import QUANT_PACKAGES, quantizer_names, read_quantizers
from crosstune.planner.gather import make_plan

pytest.importorskip("optimum.quanto", reason="the quanto extra is not installed")
OPTIONAL = ("PREFERENCE", "EXTRA", "BITS_BY_ROW", "TAKES_KIND", "DISTRIBUTION")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """quanto under another name, with no more constants than the docs ask for."""
    import crosstune.torch_engine.quant as package

    own = Path(package.__path__[0], "quanto.py").read_text(encoding="utf-8").splitlines()
    lines = [line for line in own if not line.startswith(OPTIONAL)]
    (tmp_path / "mine.py").write_text("\n".join(lines), encoding="utf-8")
    places = [*package.__path__, str(tmp_path)]
    monkeypatch.setattr(package, "__path__", places)
    assert package.__spec__ is not None
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", places)
    yield "mine"
    sys.modules.pop(f"{QUANT_PACKAGES['torch']}.mine", None)


def test_its_facts_are_read_and_its_name_is_accepted(mine: str) -> None:
    assert mine in quantizer_names()
    assert read_quantizers()[mine].bits == (8, 4, 2)
    assert list(read_quantizers())[-1] == mine, "what declares no preference comes last"
    assert make_config(quantization_backend=mine).quantization_backend == mine


def test_it_is_probed_and_not_replaced_by_another(mine: str, tiny_model: Path) -> None:
    asked = {"backend": "cpu", "train_type": "qlora", "model_name": str(tiny_model)}
    plan = make_plan(make_config(quantization_backend=mine, group_size=32, **asked))
    assert plan.backend.quantizers[mine] == (2, 4, 8)
    assert (plan.quantizer, plan.config.quantization_backend) == (mine, mine)
    assert not [a for a in plan.adjustments if a.option == "quantization_backend"]
    assert make_plan(make_config(**asked)).quantizer != mine
    with pytest.raises(ConfigError) as caught:
        make_plan(make_config(quantization_backend=mine, n_bits=3, **asked))
    assert "mine does not support 3-bit weights" in str(caught.value.problems[0])


def test_a_run_trains_with_it(mine: str, tiny_model: Path, tmp_path: Path) -> None:
    words = f"--backend cpu --train_type qlora --quantization_backend {mine} --group_size 32 --max_steps 2"
    words += f" --batch_size 2 --skip_eval --model_name {tiny_model} --output_dir {tmp_path} --name run"
    assert main(["train", *words.split()]) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["quantizer"] == mine


def test_the_constants_of_every_quantizer_are_read_without_a_framework() -> None:
    import subprocess

    code = "import sys; from crosstune.core.quantization import read_quantizers as r; r(); print({'torch', 'mlx', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
