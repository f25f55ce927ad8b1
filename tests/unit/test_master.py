"""A master address that resolves to the machine itself, as with Debian's 127.0.1.1."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.distributed import master
from crosstune.distributed.environment import Nodes
from crosstune.distributed.links import MultiNode
from crosstune.distributed.master import free_ports


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of machines for this test, with their addresses."""
    known: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def look_up(name: str, *place: Any, **more: Any) -> Any:
        return [one for address in known.get(name, [name]) for one in resolve(address, *place, **more)]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return known


@contextlib.contextmanager
def listening(name: str, **options: Any) -> Iterator[str]:
    with master.listen(name, 0, **options) as found:
        yield str(found.getsockname()[0])


def test_the_first_machine_listens_where_the_others_look(names: dict[str, list[str]]) -> None:
    names["first"] = ["127.0.1.1"]
    with listening("first", several=True) as address:
        assert address == "0.0.0.0"
    with listening("first", several=False) as address:
        assert address == "127.0.1.1"
    with listening("127.0.0.1", several=True) as address:  # a trial on one machine
        assert address == "127.0.0.1"


def test_a_machine_that_would_connect_to_itself_is_told(names: dict[str, list[str]]) -> None:
    names["first"] = ["127.0.1.1"]
    nodes = Nodes(num_nodes=2, node_rank=1, master_addr="first", master_port=free_ports(1)[0])
    with pytest.raises(UserError, match="leads back to") as told:
        MultiNode(nodes, num_local=1, connect_s=600.0, lost_s=1.0)
    assert "127.0.1.1" in told.value.why and "/etc/hosts" in told.value.do


def test_a_trial_on_one_machine_may_use_its_own_name(names: dict[str, list[str]]) -> None:
    own = socket.gethostname()
    names[own] = ["127.0.1.1"]
    for name in (own, "localhost", "127.0.0.1", "::1"):
        master.check_master(name, node_rank=1)
    nodes = Nodes(num_nodes=2, node_rank=1, master_addr=own, master_port=free_ports(1)[0])
    with pytest.raises(UserError, match="cannot be reached") as told:
        MultiNode(nodes, num_local=1, connect_s=0.1, lost_s=1.0)
    assert "resolves to 127.0.1.1, which is this node" in told.value.why


def test_which_addresses_are_loopback() -> None:
    for address in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "localhost"):
        assert master.is_loopback(address), address
    for address in ("10.0.0.1", "fe80::1%eth0", "first", "127.example.org"):
        assert not master.is_loopback(address), address
    assert master.plain_address("fe80::1%eth0") == "fe80::1"
    assert master.plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert master.plain_address("00:11:22:33:44:55") == "00:11:22:33:44:55"  # of an interface's hardware
