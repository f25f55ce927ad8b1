"""A failure of one rank ends all ranks with its error; replicas survive out of memory. Real processes over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from support import chat

from crosstune.models.tiny import tiny_model

PARTS = """
import dataclasses, errno, os, time
from pathlib import Path
import numpy as np
from crosstune.checkpoint.read import open_checkpoint
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.load import make_config
from crosstune.core.errors import PeerLost
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.files.run_record import RecordFailed, RunRecord
from crosstune.loop import save
from crosstune.runs.pipeline import train
from crosstune.torch_engine.session.session import TorchSession

first = group.ranks.first
folder = Path(FOLDER)

def run(name, **more):
    options = dict(backend="cpu", model_name=str(folder / "model"), dataset=str(folder / "rows.jsonl"),
        output_dir=str(folder), precision="fp32", train_type="full", sharding_strategy="full_shard", batch_size=1,
        gradient_accumulation_steps=1, world_size=2, lr=1e-2, max_steps=3, skip_eval=True, save_model=False,
        save_minutes=0, name=name)
    return train(make_config(**(options | more)), group=group)

def failing(name, kind, **more):
    "Return the error of a run, which must be of this kind."
    try:
        result = run(name, **more)
    except kind as error:
        return error
    assert isinstance(result.failure, kind), (group.ranks.rank, result.failure)
    return result.failure
"""

BEST = """
write, evaluate = save.write_checkpoint, TorchSession.evaluate
losses = iter([5.0, 1.0, 3.0, 4.0])  # before, after each step

def slowly(*arguments):
    time.sleep(0.7)
    return write(*arguments)

save.write_checkpoint = slowly
TorchSession.evaluate = lambda self, batches: dataclasses.replace(evaluate(self, batches), loss=next(losses))
result = run("best", skip_eval=False, eval_steps=1, save_model=True, result="best", max_new_tokens=1)
assert result.failure is None
assert result.summary["best"]["step"] == 1, result.summary
save.write_checkpoint, TorchSession.evaluate = write, evaluate
if first:
    from safetensors.numpy import load_file
    assert result.summary["result_step"] == 1, result.summary
    [file] = (folder / "best" / "model").glob("*.safetensors")
    weights = load_file(file)
    kept = open_checkpoint(folder / "best" / "checkpoints" / "step-00000001").load().weights
    for name, array in kept.items():
        np.testing.assert_allclose(weights[name], array, err_msg=name, rtol=1e-2)
group.barrier()
"""

DISK = """
full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
append = RunRecord._append

def refuse_record(self, file, data):
    if data.get("step") == 2:
        raise RecordFailed(Path(file.name), full)
    append(self, file, data)

RunRecord._append = refuse_record
error = failing("record", RecordFailed, save_steps=1)
assert "The record of the run could not be written" in str(error) and "metrics.jsonl" in str(error), error
RunRecord._append = append
group.barrier()
assert (folder / "record" / "checkpoints" / "step-00000002").is_dir(), "the completed step is kept"

def refuse_checkpoint(root, state, fields):
    raise SaveFailed(f"no room for step {fields.step}", why="a test")

save.write_checkpoint, write = refuse_checkpoint, save.write_checkpoint
for name, steps in (("during", 1), ("end", 3)):
    error = failing(name, SaveFailed, save_steps=steps)
    assert f"no room for step {steps}" in str(error), error
save.write_checkpoint = write
assert run("after").failure is None, "the processes still agree"
"""

RECOVERS = """
from crosstune.torch_engine.tasks.causal_lm import CausalLM

replicas = dict(sharding_strategy="ddp", batch_size=4, skip_eval=False, eval_samples=6, num_samples=0, eval_metric="loss")
replicas |= dict(eval_dataset=str(folder / "rows.jsonl"))
straight = run("straight", **replicas).summary
loss, evaluate = CausalLM.loss, CausalLM.evaluate

def limited(plain):
    def run(self, model, arrays):
        if not first and len(arrays["input_ids"]) > (2 if model.training else 1):
            raise RuntimeError("out of memory: a test")
        return plain(self, model, arrays)
    return run

CausalLM.loss, CausalLM.evaluate = limited(loss), limited(evaluate)
found = run("limited", **replicas).summary
CausalLM.loss, CausalLM.evaluate = loss, evaluate
assert [step["changed"] for step in found["recoveries"]] == [
    {"eval_batch_size": 2}, {"eval_batch_size": 1}, {"batch_size": 2, "gradient_accumulation_steps": 2}
], found["recoveries"]
for name in ("first_loss", "final_loss", "eval_loss"):
    assert abs(found[name] - straight[name]) < 1e-5, (name, found, straight)
"""

ALONE = """
prepare = TorchSession.prepare

def refuse(self, batch):
    if first:
        raise RuntimeError("out of memory: a test")
    return prepare(self, batch)

def refuse_evaluation(self, batches):
    TorchSession.prepare = refuse
    return evaluate(self, batches)

evaluate = TorchSession.evaluate
evaluations = [0]

def after_two(self, batches):
    evaluations[0] += 1
    return (refuse_evaluation if evaluations[0] == 3 else evaluate)(self, batches)

TorchSession.evaluate = after_two
error = failing("memory", OutOfMemory if first else PeerLost, skip_eval=False, eval_steps=1, result="last", max_new_tokens=1)
if first:
    assert "a test" in str(error) and "wait in this pass" in str(error) and error.exit_code == 2, error
else:
    assert "imed out" not in str(error), error
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    tiny_model(
        folder / "model", hidden=32, intermediate=64, num_heads=2, num_kv_heads=1, num_layers=2, vocab=507
    )
    rows = [chat(f"{a} + 1?", str(a + 1)) for a in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [BEST + DISK, RECOVERS + ALONE], ids=["slow or failing disk", "out of memory"]
)
def test_ranks_agree_when_one_fails(folder: Path, code: str) -> None:
    run_ranks([{"world": 2, "runs": []}], hook=f"FOLDER = {str(folder)!r}\n{PARTS}\n{code}")
