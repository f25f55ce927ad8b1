"""Predict the time of a training step: matmuls, memory traffic, kernel launches, communication, and generated answers.

A step is limited by the device (matmuls plus memory traffic) or by kernel launches on the host. The constants were
measured on an H200 and are used for every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from crosstune.estimate.fast_layers import fast_layer
from crosstune.estimate.memory import MemoryParts, gathered_bytes, layer_bytes, num_recomputed
from crosstune.estimate.model_shape import ModelShape, Step, adapted_linears, trained_parameters

SUSTAINED = 0.67
"""The fraction of the data sheet's rate that matmuls reach under the power limit."""
PASSES, FAST_PASSES = 29, 11
"""Number of times each byte kept for the backward pass moves through memory, in the general and the fast layers."""
FP8_RATE = 1.68
"""The sustained rate of fp8 matmuls with a scale per row, relative to bf16."""
LAUNCH_S = 10e-6
"""The host's time for a kernel; it dominates for small models."""
LAUNCHES, LAUNCHES_PER_ADAPTER, LAUNCHES_PER_QUANTIZED = 350, 25, 20
"""Kernels per step (forward, backward and update): per layer, per adapter, and per quantized weight."""
FAST_LAUNCHES = 50
"""Kernels of a fast layer with adapters (counted)."""
LINK_SHARE = 0.8
"""The fraction of a link's data rate that collectives reach."""
LATENCY_S = 20e-6
"""The time of a message to the next process."""
LARGEST_ERROR, NUM_CHECKED = 0.082, 6
"""The largest relative error of the speed over this many measured steps, none used for calibration; see test_predict.py."""
_DEVICES = {
    "B200": (2250, 8000, 900, 50),
    "GH200": (989, 4000, 450, 50),
    "H200": (989, 4800, 450, 50),
    "H100": (989, 3350, 450, 50),
    "A100-SXM4-40GB": (312, 1555, 300, 25),
    "A100": (312, 2039, 300, 25),
    "V100": (125, 900, 150, 12.5),
    "L40S": (362, 864, 32, 12.5),
    "L4": (121, 300, 32, 12.5),
    "A10": (125, 600, 32, 12.5),
    "T4": (65, 320, 16, 12.5),
    "RTX 6000 Ada": (364, 960, 32, 1.25),
    "RTX A6000": (155, 768, 32, 1.25),
    "RTX 5090": (209, 1792, 64, 1.25),
    "RTX 5080": (113, 960, 64, 1.25),
    "RTX 5070 Ti": (88, 896, 64, 1.25),
    "RTX 5070": (62, 672, 64, 1.25),
    "RTX 5060 Ti": (47, 448, 32, 1.25),
    "RTX 5060": (38, 448, 32, 1.25),
    "RTX 4090": (165, 1008, 32, 1.25),
    "RTX 4080": (97.5, 717, 32, 1.25),
    "RTX 4070 Ti": (80, 504, 32, 1.25),
    "RTX 4070": (58, 504, 32, 1.25),
    "RTX 4060 Ti": (44, 288, 16, 1.25),
    "RTX 4060": (30, 272, 16, 1.25),
    "RTX 3090 Ti": (80, 1008, 32, 1.25),
    "RTX 3090": (71, 936, 32, 1.25),
    "RTX 3080 Ti": (68, 912, 32, 1.25),
    "RTX 3080": (59.5, 760, 32, 1.25),
    "RTX 3070": (40.6, 448, 32, 1.25),
    "RTX 3060 Ti": (32.4, 448, 32, 1.25),
    "RTX 3060": (25.5, 360, 32, 1.25),
    "RTX 2080 Ti": (53.8, 616, 16, 1.25),
    "RTX 2080": (40.3, 448, 16, 1.25),
    "RTX 2070": (29.9, 448, 16, 1.25),
    "RTX 2060": (25.8, 336, 16, 1.25),
    "GTX 1080 Ti": (11.3, 484, 16, 1.25),  # fp32: it has no matrix units
    "MI300X": (1307, 5300, 448, 50),
    "MI250": (181, 1638, 50, 25),  # one of its two devices
    "MI210": (181, 1638, 50, 25),
    "RX 7900 XTX": (123, 960, 32, 1.25),
    "Arc(TM) A770": (138, 560, 32, 1.25),
    "Arc(TM) B580": (117, 456, 16, 1.25),
    "M1 Ultra": (21.0, 800, 0, 1.25),
    "M1 Max": (10.4, 400, 0, 0.125),
    "M1 Pro": (5.2, 200, 0, 0.125),
    "M1": (2.6, 68, 0, 0.125),
    "M2 Ultra": (27.2, 800, 0, 1.25),
    "M2 Max": (13.6, 400, 0, 1.25),
    "M2 Pro": (6.8, 200, 0, 0.125),
    "M2": (3.6, 100, 0, 0.125),
    "M3 Ultra": (28.4, 819, 0, 1.25),
    "M3 Max": (14.2, 400, 0, 0.125),
    "M3 Pro": (6.4, 150, 0, 0.125),
    "M3": (3.5, 100, 0, 0.125),
    "M4 Max": (17.0, 546, 0, 0.125),
    "M4 Pro": (8.5, 273, 0, 0.125),
    "M4": (4.3, 120, 0, 0.125),
    "M5 Max": (16.6, 614, 0, 0.125),  # without the matrix units of its GPU cores
    "M5 Pro": (8.3, 307, 0, 0.125),
    "M5": (4.2, 153, 0, 0.125),
}
"""Part of a device's name -> TFLOP/s, and GB/s of memory, link and network. The first match counts."""
_FAST_IN_FP8 = ("H200", "H100")


@dataclass(frozen=True)
class DeviceSpeed:
    tflops: float
    """Dense matmuls of 16-bit numbers, in 10^12 operations per second."""
    memory_gb_s: float
    link_gb_s: float
    """To another device of the same machine, in one direction: NVLink or PCIe."""
    network_gb_s: float
    """To another machine, for each device, in one direction, over the usual network card."""
    fp8: bool = False
    """True if fp8 matmuls were measured to be faster on this chip."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal machines with equal devices."""

    num_nodes: int = 1
    num_local: int = 1
    """Devices of each machine."""
    sharding: str = "ddp"

    @property
    def size(self) -> int:
        return self.num_nodes * self.num_local

    @property
    def num_shards(self) -> int:
        """The processes that shard the weights."""
        if self.sharding in ("ddp", "no_shard"):
            return 1
        return self.num_local if self.sharding.startswith("hybrid") else self.size


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of an optimizer step in seconds, by part."""

    products_s: float
    traffic_s: float
    launches_s: float
    communication_s: float
    """Exposed communication."""
    hidden_s: float
    """Communication overlapped with computation."""
    tokens: int
    """Tokens of the step across all processes."""

    @property
    def compute_s(self) -> float:
        return max(self.products_s + self.traffic_s, self.launches_s)

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def communication_share(self) -> float:
        """The fraction of the time in which the links are busy, exposed or overlapped."""
        return min(1.0, (self.communication_s + self.hidden_s) / self.seconds)

    @property
    def limit(self) -> str:
        """The part with most of the time."""
        parts = {"matmuls": self.products_s, "memory traffic": self.traffic_s}
        if self.launches_s >= self.compute_s:
            parts = {"launching kernels": self.launches_s}
        parts["communication"] = self.communication_s
        return max(parts, key=parts.__getitem__)


def find_speed(name: str) -> DeviceSpeed | None:
    """Return the speeds of a device by its name, such as "NVIDIA H200"; None for an unknown device."""
    words = f" {name} "
    for part, numbers in _DEVICES.items():
        if f" {part} " in words or f" {part}-" in words:
            return DeviceSpeed(*numbers, fp8=part in _FAST_IN_FP8)
    return None


def step_time(
    shape: ModelShape,
    step: Step,
    speed: DeviceSpeed,
    *,
    cluster: Cluster,
    tokens_per_row: float | None = None,
) -> StepTime:
    """Return the time of an optimizer step; `tokens_per_row` is the mean length of padded rows, by default the longest."""
    row = tokens_per_row if tokens_per_row is not None else step.context
    tokens = step.batch * row
    passes = step.num_micro_batches
    flops = tokens * (flops_per_token(shape, step, row) + step.extra_passes * forward_flops(shape, row))
    if step.fp8_products and speed.fp8:
        linear = shape.active_parameters() - shape.vocab * shape.hidden
        base = 2.0 * (2 + _recomputed_share(shape, step)) * linear
        flops -= (1 - 1 / FP8_RATE) * tokens * base
    products = flops / (speed.tflops * 1e12 * SUSTAINED)
    more = 1 + step.extra_passes / 3  # a third of a step is its forward pass
    traffic = more * _traffic_bytes(shape, step, tokens) / (speed.memory_gb_s * 1e9)
    launches = (
        FAST_LAUNCHES if step.fast else LAUNCHES + LAUNCHES_PER_ADAPTER * len(adapted_linears(shape, step))
    )
    if _makes_dense(step):
        launches += LAUNCHES_PER_QUANTIZED * len(shape.linears())
    after, during = communication_s(shape, step, speed, cluster=cluster)
    hidden = min(during, passes * (products + traffic))
    return StepTime(
        products_s=passes * products,
        traffic_s=passes * traffic,
        launches_s=more * passes * shape.num_layers * launches * LAUNCH_S,
        communication_s=after + during - hidden,
        hidden_s=hidden,
        tokens=int(tokens * passes * cluster.size),
    )


def flops_per_token(shape: ModelShape, step: Step, row: float) -> float:
    """Return the FLOPs of a token: two per weight in the forward pass, two for the input gradient, two for the gradient of
    a trained weight, two in recomputed blocks; and causal attention."""
    active, head = shape.active_parameters(), shape.vocab * shape.hidden
    trained = active if step.method == "full" else min(active, trained_parameters(shape, step))
    share = _recomputed_share(shape, step)
    attention = 2 * row * shape.queries * shape.num_layers
    return 2.0 * (2 * active + trained + share * (active - head)) + attention * (3 + share)


def forward_flops(shape: ModelShape, row: float) -> float:
    """Return the FLOPs of a token in a forward pass without gradients."""
    return 2.0 * shape.active_parameters() + 2 * row * shape.queries * shape.num_layers


def _recomputed_share(shape: ModelShape, step: Step) -> float:
    return num_recomputed(shape, step) / shape.num_layers


def _makes_dense(step: Step) -> bool:
    """Return True if quantized weights are dequantized for each matmul."""
    return step.quantizer != "none" and not (step.quantizer == "fp8" and step.fp8_products)


def _traffic_bytes(shape: ModelShape, step: Step, tokens: float) -> float:
    """Return the memory traffic of a micro-batch outside of matmuls."""
    again = _recomputed_share(shape, step)
    if step.fast:
        kept = FAST_PASSES * fast_layer(shape, step).kept().none
    else:
        kept = PASSES * layer_bytes(shape, replace(step, batch=1)) // step.context
    moved = tokens * kept * (1 + again / 3) * shape.num_layers  # a third of it is the forward pass
    if _makes_dense(step):  # bits are read and dense weights written for each matmul
        linear = max(0, shape.language_parameters - shape.embeddings)
        moved += (2 + again) * linear * (step.n_bits / 8 + step.width)
    return moved


def communication_s(
    shape: ModelShape, step: Step, speed: DeviceSpeed, *, cluster: Cluster
) -> tuple[float, float]:
    """Return the communication time of a step in seconds: after the passes, and overlappable with the passes.

    Replicas sum fp32 gradients once, after the passes. Shards gather weights in both passes of every micro-batch and
    scatter gradients, overlapping the layer before.
    """
    if cluster.size == 1:
        return 0.0, 0.0
    trained = trained_parameters(shape, step)
    shards = cluster.num_shards
    replicas = cluster.size // shards
    reduced = 0.0
    if replicas > 1:
        across = cluster.num_nodes > 1
        reduced = collective_s(
            8 * trained / shards, replicas, speed, num_local=cluster.num_local, across=across
        )
    if shards == 1:
        return reduced, 0.0
    across = cluster.num_nodes > 1 and shards > cluster.num_local
    one_block = gathered_bytes(replace(shape, vocab=0), replace(step, num_shards=2, method="lora")) / 2
    stored = one_block * shape.num_layers + shape.embeddings * step.width
    moved = 2 * stored + (4 * trained if step.method == "full" else 0)
    latency = 3 * shape.num_layers * LATENCY_S * math.log2(shards)
    gathered = latency + collective_s(moved, shards, speed, num_local=cluster.num_local, across=across)
    return reduced, step.num_micro_batches * gathered


def collective_s(num_bytes: float, size: int, speed: DeviceSpeed, *, num_local: int, across: bool) -> float:
    """Return the time of a ring of `size` processes. Between nodes, data uses all network cards and the links inside."""
    link = speed.link_gb_s or speed.network_gb_s
    rate = min(link, speed.network_gb_s * num_local) if across else link
    bytes_per_s = max(rate, 1e-3) * 1e9 * LINK_SHARE
    return num_bytes * (size - 1) / size / bytes_per_s + LATENCY_S * math.log2(size)


CACHE_SHARE = 0.6
"""The fraction of the memory beside the weights that the caches may use; prompts, logits and fragmentation use the rest."""
MOST_ROWS_ON_GPU, MOST_ROWS_ON_CPU = 256, 64
BANDWIDTH_SHARE = 0.5
"""Fraction of the memory bandwidth that decoding reaches at least; the generator is built for this."""


@dataclass(frozen=True, kw_only=True)
class GenerationPhase:
    """The generation of a step on each device."""

    num_answers: int
    num_tokens: int
    """Maximum tokens of all answers."""
    num_rows: int
    """Answers that are decoded at once."""
    cache_bytes: int
    seconds: float | None
    """None for a device of unknown speed."""


def generation_phase(
    shape: ModelShape,
    memory: MemoryParts,
    *,
    num_answers: int,
    longest_prompt: int,
    max_new_tokens: int,
    usable_bytes: int,
    on_gpu: bool,
    speed: DeviceSpeed | None,
) -> GenerationPhase:
    """Estimate a step whose answers all have their maximum length, in 16 bits."""
    row_bytes = 2 * 2 * shape.keys * shape.num_layers * (longest_prompt + max_new_tokens)
    free = max(0, usable_bytes - memory.weights) if usable_bytes else row_bytes * num_answers
    most = MOST_ROWS_ON_GPU if on_gpu else MOST_ROWS_ON_CPU
    num_rows = max(1, min(num_answers, most, int(CACHE_SHARE * free) // max(1, row_bytes)))
    seconds = None
    if speed is not None:
        # Each step reads the weights, and the caches, which are half full on average.
        read = memory.weights + num_rows * row_bytes // 2
        steps = math.ceil(num_answers / num_rows) * max_new_tokens
        seconds = steps * read / (speed.memory_gb_s * 1e9 * BANDWIDTH_SHARE)
    return GenerationPhase(
        num_answers=num_answers,
        num_tokens=num_answers * max_new_tokens,
        num_rows=num_rows,
        cache_bytes=num_rows * row_bytes,
        seconds=seconds,
    )
