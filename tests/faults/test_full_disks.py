"""A disk that fills while a command writes is an error with exit code 2; nothing is left behind, and the next try works.

`make faults` tries every tenth of the bytes of every command.
"""

from __future__ import annotations

import os

import pytest
from injection import disks, full_disks

QUICK = ("import", "merge", "judge predict")
SMALL = ("export vllm", "latents eval", "eval")
"""They write too little to fill a disk."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> full_disks.Inputs:
    if not hasattr(os, "fork") or not disks.can_mount(tmp_path_factory.mktemp("mounts")):
        pytest.skip(
            "no right to mount a file system; run the tests as root, or where users may make namespaces"
        )
    return full_disks.Inputs(tmp_path_factory.mktemp("writers"))


@pytest.mark.parametrize(
    "writer",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in full_disks.WRITERS
        if name not in full_disks.LONG
    ],
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
    assert any(each.kills for each in trials) or writer in SMALL, "a disk that is full stops the command"
