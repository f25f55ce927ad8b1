"""Copy tensors between a device and host memory around a collective."""

from __future__ import annotations

import torch


class HostCopies:
    """The host buffers of one collective, and the tensors that its results are copied to.

    Contiguous host tensors serve as their own buffers, unless `stage_host` asks for copies, as a device needs them.
    """

    def __init__(self, *, stage_host: bool = False) -> None:
        self._stage_host = stage_host
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.results: list[torch.Tensor] = []
        """Host tensors with the results, for a division in place."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a collective reads, contiguous on the host; reading waits for the device."""
        return on_host(tensor, copy=self._stage_host)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host buffer that a collective writes, to be copied to `tensor` at the end."""
        if self._is_buffer(tensor):
            return self._use(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.give(host, to=tensor)
        return host

    def both_ways(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host buffer that a collective reads and changes, to be copied back at the end."""
        if self._is_buffer(tensor):
            return self._use(tensor)
        host = on_host(tensor, copy=True)
        self.give(host, to=tensor)
        return host

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        return not self._stage_host and tensor.device.type == "cpu" and tensor.is_contiguous()

    def _use(self, tensor: torch.Tensor) -> torch.Tensor:
        self.results.append(tensor.detach())
        return self.results[-1]

    def give(self, host: torch.Tensor, *, to: torch.Tensor) -> None:
        self.results.append(host)
        self._pending.append((host, to.detach()))

    def finish(self) -> None:
        """Copy the results to their tensors. A blocking copy: any stream may read them afterwards."""
        for host, tensor in self._pending:
            tensor.copy_(host.view(tensor.shape))
        self._pending.clear()


def on_host(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=copy).contiguous()


def as_bytes(host: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes: gloo moves only some dtypes, without fp8 and int16."""
    return host.view(-1).view(torch.uint8)
