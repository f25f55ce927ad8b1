"""Rehearse one rank of a sharded run: open the model and run a step on tensors without values, in a group without peers.

Torch's fake process group returns at once from every collective, so one process shows what each of a thousand ranks
stores and sends. The group is torch's default group: call this in a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

from crosstune.config.resolve.plan import Plan
from crosstune.core.protocols import PreparedBatch
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.estimate.model_shape import ModelShape
from crosstune.estimate.rehearsal import Rehearsal
from crosstune.models.llama_layout import Llama
from crosstune.process.ranks import Group, Ranks
from crosstune.torch_engine.count_step import CountStep, count_first_step
from crosstune.torch_engine.import_transformers import import_transformers
from crosstune.torch_engine.loading.load import attention_name, read_config
from crosstune.torch_engine.open import open_session
from crosstune.torch_engine.sharding.parallel import Parallel
from crosstune.torch_engine.task import BuildContext
from crosstune.torch_engine.tasks.causal_lm import CausalLM


def rehearse(
    plan: Plan, ranks: Ranks, *, folder: Path | None, on_progress: Callable[[str], None]
) -> Rehearsal:
    """Count a step of rank 0, which holds the largest shards. The sizes are from the model's folder, or from the plan."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fitted = plan.fitted
    assert fitted is not None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.size)
    plan = replace(plan, backend=replace(plan.backend, device="cpu"))
    with contextlib.ExitStack() as stack:
        task = _WithoutWeights(folder, fitted.shape, stack)
        on_progress(f"building and sharding the model for {ranks.size:,} ranks")
        session = open_session(plan, model_folder=None, task=task, group=_WithoutPeers(ranks))
        assert session.parallel is not None
        session.parallel = _WithoutSeeds(**vars(session.parallel))
        batch = _full_batch(task, rows=fitted.step.batch, length=fitted.step.context)
        seen: dict[str, str] = {}
        window = [batch] * (ranks.size * fitted.step.num_micro_batches)
        return count_first_step(
            session,
            lambda: session._backward(window),
            CountStep(num_local=ranks.local_size),
            on_phase=lambda name: None if name in seen else on_progress(seen.setdefault(name, name)),
        )


class _WithoutPeers(Group):
    """A group in which all ranks have the same numbers."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def gather(self, data: bytes) -> list[bytes]:
        return [data] * self.ranks.size


class _WithoutSeeds(Parallel):
    """Ranks that draw no random numbers: a fake generator has no state."""

    def _seeds(self, count: int) -> list[int]:
        return []


class _WithoutWeights(CausalLM):
    """A causal language model whose tensors have no values from `build` on."""

    def __init__(self, folder: Path | None, shape: ModelShape, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._folder, self._shape, self._stack = folder, shape, stack

    def build(self, context: BuildContext) -> nn.Module:
        import_transformers()
        from transformers import AutoModelForCausalLM

        self.context = context
        config = read_config(self._folder) if self._folder is not None else _config_of(self._shape)
        self._stack.enter_context(_as_with_values())
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model: nn.Module = AutoModelForCausalLM.from_config(
            config,
            dtype=context.precision.weights,
            attn_implementation=attention_name(context.plan, config),
            trust_remote_code=False,
        )
        return model


def _config_of(shape: ModelShape) -> Any:
    """Return the config of a Llama of these sizes."""
    from transformers import LlamaConfig

    llama = Llama(
        vocab=shape.vocab,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads or shape.num_heads,
        head_dim=shape.head_dim or shape.hidden // shape.num_heads,
        tied=shape.tied,
        max_context=shape.max_context or 2**17,
    )
    unused = ("architectures", "model_type")
    return LlamaConfig(**{key: value for key, value in llama.config().items() if key not in unused})


def _full_batch(task: CausalLM, *, rows: int, length: int) -> PreparedBatch:
    """Return a batch of full rows in which all tokens but the first are supervised."""
    row = Example(tokens=np.zeros(length, np.int32), supervised=np.ones(length, np.bool_), index=0)
    batch = pad_rows([row] * rows, pad_id=0)
    arrays = {name: torch.from_numpy(array) for name, array in task.arrays(batch).items()}
    return PreparedBatch(weight=batch.weight, num_tokens=batch.num_tokens, arrays=arrays)


class _OneOf(Sequence[torch.Tensor]):
    """The chunks of a tensor, each made when it is read."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._rows = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        size = self._tensor.shape[self._dim]
        start = min(number * self._rows, size)
        return self._tensor.narrow(self._dim, start, min(self._rows, size - start))


@contextlib.contextmanager
def _as_with_values() -> Iterator[None]:
    """Let libraries treat tensors without values like others, as far as they have the functions replaced here.

    transformers makes a mask for fake tensors that it would skip for real ones. FSDP2 makes a chunk of a parameter for each
    rank to keep one: a thousand fake chunks of each parameter take minutes.
    """
    from transformers import masking_utils

    replaced: list[tuple[Any, str, Any]] = [
        (masking_utils, "is_tracing", lambda tensor=None: False),
        (_fsdp_param, "_chunk_with_empty", lambda tensor, count, dim: _OneOf(tensor, count, dim)),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, function in replaced:
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, function)
        yield
