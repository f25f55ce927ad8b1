"""Generate answers by continuous batching: rows that end are replaced by waiting prompts."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import psutil
import torch
import torch.distributed as dist

from crosstune.core.answers import Answer, Earlier, OnAnswer, OnToken, Question, group_equal
from crosstune.core.sampling import Sampling
from crosstune.estimate.step_time import CACHE_SHARE, MOST_ROWS_ON_CPU, MOST_ROWS_ON_GPU
from crosstune.torch_engine.device import clear_cache
from crosstune.torch_engine.generate.sampler import Block, Sampler, mark_seen, split_packs

if TYPE_CHECKING:
    from crosstune.torch_engine.generate.fast import FastRows
    from crosstune.torch_engine.generate.general import GeneralRows

    Rows: TypeAlias = FastRows | GeneralRows

_FIRST_COLUMNS = 512
"""Initial columns for new tokens; the cache grows for longer answers."""
_LOGIT_BYTES = 32
"""Bytes of a logit and its copies while a token is chosen."""
_STEPS_UNSEEN = 8
"""Steps on a GPU between two checks for finished rows."""
_STEPS_BEFORE_GRAPH = 8
"""Initial steps without a CUDA graph: they compile the kernels, and short answers do not need a graph."""


def sample_answers(
    rows: Rows,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    earlier: Earlier | None = None,
    on_token: OnToken | None = None,
    on_answer: OnAnswer | None = None,
    most_rows: int | None = None,
    synchronized: bool = False,
    uses_graph: bool = True,
) -> list[Answer]:
    """Return an answer to each prompt. `synchronized`: all ranks of a sharded model make the same calls, and use the tokens
    of rank 0. `most_rows` and `uses_graph=False` limit what the device allows.
    """
    batch = _Batch(
        rows,
        group_equal(prompts, earlier),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        on_token=on_token if len(prompts) == 1 else None,
        on_answer=on_answer,
        synchronized=synchronized,
        uses_graph=uses_graph and rows.allows_graph and not synchronized,
    )
    batch.run(min(len(prompts), most_rows or len(prompts)))
    return [batch.answers[place] for place in range(len(prompts))]


def plan_rows(rows: Rows, *, columns: int, num_answers: int, synchronized: bool) -> int:
    """Return the number of rows whose caches of this many columns fit into the free memory."""
    device = rows.device
    row_bytes = rows.column_bytes * columns + _LOGIT_BYTES * rows.vocabulary
    most = MOST_ROWS_ON_CPU if device.type == "cpu" else MOST_ROWS_ON_GPU
    found = max(1, min(most, num_answers, int(CACHE_SHARE * free_memory(device)) // row_bytes))
    if synchronized:
        fewest = torch.tensor(found, device=device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        found = int(fewest)
    return found


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors may use."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "mem_get_info"):
        return int(psutil.virtual_memory().available)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


@dataclass(frozen=True)
class _Saved:
    """A computed prompt with answers that still wait for a row."""

    question: Question
    block: Block
    logits: torch.Tensor


class _Batch:
    """The answers of a call: the waiting answers, and the tensors of the answers in rows."""

    def __init__(
        self,
        rows: Rows,
        questions: Sequence[Question],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        sampling: Sampling,
        on_token: OnToken | None,
        on_answer: OnAnswer | None,
        synchronized: bool,
        uses_graph: bool,
    ) -> None:
        self.rows, self.device, self.most = rows, rows.device, max_new_tokens
        self.longest = len(questions[0].prompt) if questions else 0
        self.waiting = deque((each, number) for each in questions for number in range(len(each.places)))
        self.sampling, self.sampler = sampling, Sampler(sampling, rows.device)
        self.on_token, self.on_answer = on_token, on_answer
        self.synchronized, self.uses_graph = synchronized, uses_graph
        self.stop_ids = torch.tensor(list(stop_ids), dtype=torch.long, device=self.device)
        self.answers: dict[int, Answer] = {}
        self.saved: _Saved | None = None
        self.running: dict[int, tuple[Question, int]] = {}
        self.counts: list[int] = []
        """New tokens of each row, as known to the host: a row that ended since the last check still counts."""

    def run(self, most_rows: int) -> None:
        columns = self.longest + self.most
        planned = plan_rows(self.rows, columns=columns, num_answers=most_rows, synchronized=self.synchronized)
        if not self.waiting or self.most < 1:
            self.answers = {
                place: Answer(tokens=[], log_probs=[], stopped=False)
                for question, _ in self.waiting
                for place in question.places
            }
            return
        self.rows.allocate(planned, self.longest + min(self.most, _FIRST_COLUMNS), columns)
        self._allocate(planned)
        with contextlib.closing(_Step(self._step, self.uses_graph, self.device)) as step:
            while self.waiting or self.running:
                free = len(self.counts) - len(self.running)
                if free >= min(len(self.waiting), max(1, len(self.counts) // 8)) and self.waiting:
                    self._fill()
                elif not self.uses_graph and len(self.running) <= len(self.counts) // 2:
                    self._drop_ended()
                for _ in range(self._steps_unseen()):
                    if self.rows.advance():
                        step.reset()
                    step.run()
                    self.counts = [count + 1 for count in self.counts]
                    if self.on_token is not None:
                        self.on_token(int(self.tokens[0]))
                self._collect()

    def _allocate(self, num_rows: int) -> None:
        def make(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, *size, dtype=dtype, device=self.device)

        self.tokens, self.num_new = make(dtype=torch.long), make(dtype=torch.long)
        self.ended = make(dtype=torch.bool)
        # Finished rows write to the last column.
        self.found, self.log_probs = (
            make(self.most + 1, dtype=torch.long),
            make(self.most + 1, dtype=torch.float),
        )
        draws = self.most + 1 if self.sampling.temperature > 0 else 1
        self.numbers = make(draws, dtype=self.sampler.wide)
        self.seen = make(self.rows.vocabulary, dtype=torch.bool) if self.sampler.has_penalty else None
        self.counts = [0] * num_rows

    def _fill(self) -> None:
        """Give free rows to waiting answers, and choose their first tokens."""
        free = [row for row in range(len(self.counts)) if row not in self.running]
        chosen = {row: self.waiting.popleft() for row in free[: len(self.waiting)]}
        self.running |= chosen
        groups = [
            (question, [row for row, _ in group])
            for question, group in itertools.groupby(chosen.items(), key=lambda item: item[1][0])
        ]
        logits = list[torch.Tensor]()
        if self.saved is not None and groups[0][0] is self.saved.question:
            self.rows.load(self.saved.block, groups[0][1])
            logits.append(self.saved.logits)
        new = groups[len(logits) :]
        prompts = [question.prompt for question, _ in new]
        for pack in split_packs(prompts, self.device):
            logits.append(self.rows.fill(prompts[pack], [own for _, own in new[pack]]))
        last, own = groups[-1]
        if not self.waiting or self.waiting[0][0] is not last:
            self.saved = None
        elif new:
            block = self.rows.save(own[0], len(last.prompt))
            self.saved = _Saved(last, block, logits[-1][-1:].clone())
        sources = [number for number, (_, own) in enumerate(groups) for _ in own]
        self._begin(chosen, torch.cat(logits)[torch.tensor(sources, device=self.device)])

    def _begin(self, chosen: dict[int, tuple[Question, int]], logits: torch.Tensor) -> None:
        places = torch.tensor(list(chosen), device=self.device)
        if self.sampling.temperature > 0:
            numbers = [
                torch.from_numpy(each.draws(self.sampling, number, self.most))
                for each, number in chosen.values()
            ]
            self.numbers[places, : self.most] = torch.stack(numbers).to(self.device, self.sampler.wide)
        seen = None
        if self.seen is not None:
            seen = mark_seen([each.prompt for each, _ in chosen.values()], logits.shape[1], self.device)
        tokens, log_probs = self.sampler.choose(logits, self.numbers[places, 0], seen)
        self._share(tokens)
        if self.seen is not None and seen is not None:
            self.seen[places] = seen
        self.tokens[places], self.num_new[places] = tokens, 1
        self.found[places, 0], self.log_probs[places, 0] = tokens, log_probs
        self.ended[places] = self._is_stop(tokens)
        for row in chosen:
            self.counts[row] = 1
        if self.on_token is not None:
            self.on_token(int(tokens[0]))
        self._collect()

    def _step(self) -> None:
        """Append the last tokens and choose the next, all on the device."""
        logits = self.rows.step(self.tokens)
        numbers = self.numbers[:, 0]
        if self.numbers.shape[1] > 1:
            numbers = self.numbers.gather(1, self.num_new[:, None])[:, 0]
        tokens, log_probs = self.sampler.choose(logits, numbers, self.seen)
        self._share(tokens)
        places = torch.where(self.ended, self.most, self.num_new)[:, None]
        self.found.scatter_(1, places, tokens[:, None])
        self.log_probs.scatter_(1, places, log_probs[:, None])
        self.num_new.add_(~self.ended)
        self.ended.logical_or_(self._is_stop(tokens)).logical_or_(self.num_new >= self.most)
        self.tokens.copy_(tokens)

    def _share(self, tokens: torch.Tensor) -> None:
        if self.synchronized:
            dist.broadcast(tokens, src=0)

    def _is_stop(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens[:, None] == self.stop_ids).any(1)

    def _steps_unseen(self) -> int:
        """Return the number of steps until the next check for finished rows."""
        if not self.running:
            return 0
        left = self.most - max(self.counts[row] for row in self.running)
        looks_always = self.device.type == "cpu" or self.on_token is not None
        most = 1 if looks_always else _STEPS_UNSEEN
        return min(left, most) if len(self.stop_ids) else 1 if self.on_token is not None else left

    def _collect(self) -> None:
        """Collect the answers of finished rows."""
        flags = self.ended.tolist() if len(self.stop_ids) else [False] * len(self.counts)
        ended = [row for row in self.running if flags[row] or self.counts[row] >= self.most]
        if not ended:
            return
        places = torch.tensor(ended, device=self.device)
        counts = self.num_new[places].tolist()
        tokens, log_probs = self.found[places].tolist(), self.log_probs[places].tolist()
        stops = self._is_stop(self.found[places, self.num_new[places] - 1]).tolist()
        for index, (row, count) in enumerate(zip(ended, counts, strict=True)):
            question, number = self.running.pop(row)
            answer = Answer(
                tokens=tokens[index][:count], log_probs=log_probs[index][:count], stopped=stops[index]
            )
            self.answers[question.places[number]] = answer
            self.rows.release(row)
            if self.on_answer is not None:
                self.on_answer(answer)

    def _drop_ended(self) -> None:
        """Drop finished rows if no answer waits for them."""
        if self.waiting or not self.running:
            return
        kept = sorted(self.running)
        self.rows.keep(kept)
        places = torch.tensor(kept, device=self.device)
        for name in ("tokens", "num_new", "ended", "found", "log_probs", "numbers", "seen"):
            tensor = getattr(self, name)
            setattr(self, name, tensor if tensor is None else tensor[places])
        self.counts = [self.counts[row] for row in kept]
        self.running = {place: self.running[row] for place, row in enumerate(kept)}


class _Step:
    """A step that is captured as a CUDA graph once it has run a few times."""

    def __init__(self, step: Callable[[], None], uses_graph: bool, device: torch.device) -> None:
        self.step, self.uses_graph, self.device = step, uses_graph, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_run = 0

    def run(self) -> None:
        if self.graph is None and self.uses_graph and self.num_run >= _STEPS_BEFORE_GRAPH:
            self.graph = torch.cuda.CUDAGraph()
            # Only this thread's calls are recorded: a prefetching thread may pin memory meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
        self.num_run += 1

    def reset(self) -> None:
        """Drop the graph, whose tensors have moved. The next step runs without one, since it may compile kernels."""
        self.graph, self.num_run = None, min(self.num_run, _STEPS_BEFORE_GRAPH - 1)

    def close(self) -> None:
        if self.graph is not None:
            self.graph = None
            clear_cache(self.device)  # the memory of a graph is not reused otherwise
