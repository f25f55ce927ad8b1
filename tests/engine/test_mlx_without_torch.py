"""The commands with MLX on a machine that has no torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

import crosstune

WITHOUT_TORCH = """
import json, sys
HIDDEN = {"torch", "torchgen", "torchao", "peft", "accelerate", "bitsandbytes", "hqq", "optimum"}
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from crosstune.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    assert not HIDDEN & set(sys.modules)
    print("[end of a command with exit code", code, flush=True)
    print("[end of a command with exit code", code, file=sys.stderr, flush=True)
"""
END = re.compile(r"\[end of a command with exit code (\d+)\n")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run_without_torch(*commands: list[str]) -> list[Done]:
    """Run the commands in one process, in which torch cannot be found."""
    source = str(Path(crosstune.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    codes = [int(code) for code in END.findall(done.stdout)]
    assert len(codes) == len(commands), done.stderr
    texts = zip(codes, END.split(done.stdout)[::2], END.split(done.stderr)[::2], strict=False)
    return [Done(code=code, out=out, err=err) for code, out, err in texts]


@pytest.mark.slow
def test_a_run_needs_no_torch(tiny_model: Path, tmp_path: Path) -> None:
    folder, bits = tmp_path / "alone", tmp_path / "bits"
    amount = ["--max_steps", "2", "--dataset_samples", "8", "--eval_samples", "2", "--max_new_tokens", "4"]
    place = ["--output_dir", str(tmp_path), "--name", folder.name]
    trained, reported, planned, merged, written, converted, examined = run_without_torch(
        ["train", "--model_name", str(tiny_model), *place, *amount],
        ["report", str(folder)],
        ["plan", "--model_name", str(tiny_model), "--train_type", "qlora", "--json"],
        ["merge", str(folder)],
        ["export", str(folder), "--to", "gguf", "--gguf_type", "q4_k_m", "--imatrix", "--json"],
        ["convert", str(tiny_model), "--to", "mlx", "--out", str(bits), "--json"],
        ["doctor", "--no_train", "--json"],
    )
    assert trained.code == 0, trained.err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["engine"], summary["steps"]) == ("finished", "mlx", 2)
    assert reported.code == 0 and "report.html" in reported.out
    assert "</html>" in (folder / "report.html").read_text()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads(planned.out)["quantizer"] == "mlx"
    assert merged.code == 0, merged.err
    assert (folder / "merged" / "model.safetensors").is_file()
    assert written.code == 0, written.err
    report = json.loads(written.out)
    assert report["checked_by"] == "llama.cpp" and report["num_weighted"] > 10
    assert report["unquantized"]["agreement"]["relative"] < 0.02
    assert converted.code == 0, converted.err
    assert json.loads(converted.out)["checked_by"] == "mlx-lm"
    assert examined.code == 0, examined.err
    backends = json.loads(examined.out)["backends"]
    assert backends["mlx"]["available"] and not backends["cpu"]["available"]
