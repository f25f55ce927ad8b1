"""A disk that fills while a command writes is an error with exit code 2; nothing is left behind, and the next try works.

One command for each way to write: runs, staged folders, archives, journals, pages. `make faults` tries every tenth of the
bytes of every command.
"""

from __future__ import annotations

import os

import pytest
from injection import disks, full_disks

QUICK = ("import", "merge", "judge predict")
LONGER = (
    "train with samples",
    "preference",
    "latent train",
    "resume",
    "export gguf",
    "export ollama",
    "convert hqq",
    "convert mlx",
    "report",
    "generate",
    "pairs make",
    "judge eval",
    "latents build",
    "latents decode",
    "move",
    "continue archive",
    "checkpoint import",
    "push",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> full_disks.Inputs:
    if not hasattr(os, "fork") or not disks.can_mount(tmp_path_factory.mktemp("mounts")):
        pytest.skip(
            "no right to mount a file system; run the tests as root, or where users may make namespaces"
        )
    return full_disks.Inputs(tmp_path_factory.mktemp("writers"))


@pytest.mark.parametrize(
    "writer",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)],
)
def test_a_disk_that_fills_while_a_command_writes(writer: str, inputs: full_disks.Inputs) -> None:
    sizes = full_disks.measure(inputs, writer)
    if sizes is None:
        pytest.skip("the command needs a package that is not installed")
    peak, largest = sizes
    trials = [
        full_disks.fill(inputs, writer, tenth=7, peak=peak),
        full_disks.limit(inputs, writer, tenth=7, largest=largest),
    ]
    assert [each for each in trials if each.problems] == []
    assert any(each.kills for each in trials), "a disk that is full stops the command"
