"""Rehearse one rank of a sharded run: open the model and run a step on tensors without values, in a group without peers.

Torch's fake process group returns at once from every collective, so one process shows what each of a thousand ranks
stores and sends. The group is torch's default group: call this in a process of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from crosstune.config.resolve.plan import Plan
from crosstune.core.profiling import FORWARD, no_phase
from crosstune.core.protocols import PreparedBatch
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.estimate.model_shape import ModelShape
from crosstune.estimate.rehearsal import Collective, Rehearsal
from crosstune.models.llama_layout import Llama
from crosstune.process.ranks import Group, Ranks
from crosstune.torch_engine.import_transformers import import_transformers
from crosstune.torch_engine.loading.load import attention_name, read_config
from crosstune.torch_engine.open import open_session
from crosstune.torch_engine.session.session import TorchSession
from crosstune.torch_engine.sharding.local_shard import is_sharded, local_part
from crosstune.torch_engine.sharding.parallel import Parallel
from crosstune.torch_engine.task import BuildContext
from crosstune.torch_engine.tasks.causal_lm import CausalLM

_KINDS = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_gather": "all-gather",
}
"""Part of the name of torch's operator -> its kind."""


class CountStep(TorchDispatchMode):
    """Count the bytes of storages that exist, their peak, and the collectives, in its `with` block.

    Reading a value of a fake tensor, which has none, gives 1.
    """

    def __init__(self, *, num_local: int) -> None:
        super().__init__()
        self.held_bytes = self.peak_bytes = 0
        self._num_local = num_local
        self._sizes: dict[int, int] = {}
        self._calls: Counter[tuple[str, int, int, bool]] = Counter()

    def __enter__(self) -> CountStep:
        self._resizing = _watch_resizes(self._resize)
        self._resizing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # DTensor then calls the operators of its shard, which come here
        if func.namespace == "c10d":
            self._count_call(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        self.add(each for each in tree_iter(out) if isinstance(each, torch.Tensor))
        return out

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count tensors, each storage once; return the bytes that are new."""
        before = self.held_bytes
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = 0
                weakref.finalize(storage, self._free, key)
                self._resize(key, storage.nbytes())
        return self.held_bytes - before

    def restart_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.held_bytes
        return peak

    def collectives(self) -> list[Collective]:
        return [
            Collective(kind=kind, num_bytes=num_bytes, times=times, num_ranks=num_ranks, across_nodes=across)
            for (kind, num_bytes, num_ranks, across), times in sorted(self._calls.items())
        ]

    def _resize(self, key: int, num_bytes: int) -> None:
        if key in self._sizes:
            self.held_bytes += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _free(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)

    def _count_call(self, func: Any, args: Any) -> None:
        name = func._schema.name.removeprefix("c10d::").strip("_")
        kind = next((kind for part, kind in _KINDS.items() if part in name), name)
        num_bytes = max(
            (each.nbytes for each in tree_iter(args) if isinstance(each, torch.Tensor)), default=0
        )
        ranks = _ranks_of(args)
        nodes = {rank // self._num_local for rank in ranks}
        self._calls[kind, num_bytes, len(ranks), len(nodes) > 1] += 1


def _ranks_of(args: Any) -> list[int]:
    """Return the ranks of a collective; its group is one of the arguments of the operator."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
    return list(range(dist.get_world_size()))


def _is_fake(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


@contextlib.contextmanager
def _watch_resizes(on_resize: Any) -> Iterator[None]:
    """Report new sizes of storages: FSDP2 frees gathered parameters by resizing them, which no operator shows."""
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: Any, num_bytes: int) -> Any:
        out = resize(storage, num_bytes)
        on_resize(storage._cdata, num_bytes)
        return out

    torch.UntypedStorage.resize_ = resize_and_report
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def count_first_step(
    session: TorchSession,
    backward: Callable[[], object],
    counter: CountStep,
    *,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Rehearsal:
    """Run `backward` and the first update of an opened session, and count them."""
    masters = session.masters
    weights = counter.add([*session.model.parameters(), *session.model.buffers(), *masters.masters.values()])
    activations = 0

    @contextlib.contextmanager
    def watch(name: str) -> Iterator[None]:
        nonlocal activations
        on_phase(name)
        before = counter.held_bytes
        yield
        if name == FORWARD:
            activations = max(activations, counter.held_bytes - before)

    session.phase = watch
    with counter:
        backward()
        gradients = sum(
            tensor.grad.nbytes if not is_sharded(tensor.grad) else local_part(tensor.grad).nbytes
            for tensor in {*masters.masters.values(), *masters.parameters.values()}
            if tensor.grad is not None
        )
        in_passes, before = counter.restart_peak(), counter.held_bytes
        session.update(lr=1e-6)
        optimizer = counter.held_bytes - before + gradients
        in_update = counter.restart_peak()
    session.phase = no_phase
    return Rehearsal(
        num_ranks=session.parallel.size if session.parallel is not None else 1,
        parameters=session.num_parameters()[1],
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        peak=max(in_passes + optimizer, in_update),
        collectives=counter.collectives(),
    )


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
            lambda: session.compute_gradients(window),
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
