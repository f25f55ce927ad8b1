"""Ray: reserve one bundle per node on an existing cluster and start a launcher in each. torch connects the processes.

The nodes import this module for `NodeActor`; only the driver of a job imports ray."""

from __future__ import annotations

import collections
import importlib.util
import logging
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crosstune.config.load import child_environment
from crosstune.core.errors import UserError
from crosstune.distributed.jobs.attached import AttachedProcess
from crosstune.distributed.jobs.job import CPUS, RANK_VARIABLES, RESTARTS, Job, JobOption, Started, matches
from crosstune.distributed.jobs.nodes import LOST, Node, run_nodes
from crosstune.distributed.master import free_ports

ADDRESS = JobOption(
    "address",
    "ADDRESS",
    "address of the Ray cluster (default: the cluster of this machine)",
    default="auto",
    check=matches(
        r"[A-Za-z0-9][A-Za-z0-9.:/_-]*|\[[0-9A-Fa-f:.]+\]:[0-9]+", "auto, or HOST:PORT of the head"
    ),
)
OPTIONS = (ADDRESS, CPUS, RESTARTS)
NUM_LINES = 15
ANSWER_S = 30.0
"""Time for an actor to answer before it counts as lost."""
NOTICE_EVERY_S = 15.0
"""Seconds between two lines about waiting for resources."""


def check(job: Job) -> list[UserError]:
    return []  # Ray needs no option


def bundle(job: Job) -> dict[str, float]:
    """Return the resources of one node's launcher."""
    cpus = job.options["cpus"] or job.num_local
    return {"CPU": float(cpus)} | ({"GPU": float(job.num_gpus)} if job.num_gpus else {})


def write(job: Job) -> str:
    """Return the lines that start the job detached from this terminal."""
    own = ["--on", "ray", "--nnodes", str(job.num_nodes), "--nproc_per_node", str(job.num_local)]
    own += ["--gpus", str(job.num_gpus), "--restarts", str(job.options["restarts"])]
    own += ["--cpus", str(job.options["cpus"])] if job.options["cpus"] else []
    own += ["--python", job.python] if job.python else []
    command = [*job.command()[:3], "launch", *own, "--", *job.train_words()]
    address = job.options["address"]
    to = [] if address == "auto" else ["--address", f"http://{address.rpartition(':')[0] or address}:8265"]
    # A script, because Ray joins the words again, and some versions leave $(...) and backticks in them active.
    script = str(job.folder / f"{job.name}.ray.sh")
    lines = [
        f"# {job.num_nodes} bundles of {bundle(job)}, spread across the nodes of the cluster.",
        "ray status",
        f"cat > {shlex.quote(script)} <<'END_OF_SCRIPT'",
        f"cd {shlex.quote(str(job.folder))} && exec {shlex.join(command)}",
        "END_OF_SCRIPT",
        shlex.join(["ray", "job", "submit", *to, "--no-wait", "--", "bash", script]),
    ]
    return "\n".join(lines) + "\n"


def start(job: Job) -> Started:
    """Connect to the cluster, place the launchers, and wait for them to exit."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "--on ray needs Ray.",
            do="pip install 'crosstune[ray]'; or add --print for the lines to type on a node of the cluster",
        )
    import ray

    print(f"connecting to the Ray cluster at {job.options['address']} ...", file=sys.stderr, flush=True)
    try:
        ray.init(address=job.options["address"], log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Cannot reach a Ray cluster at {job.options['address']}.",
            why=str(error),
            do="start one with `ray start --head` on this machine and `ray start --address HOST:6379` on the other nodes",
        ) from error
    cluster = _Cluster(job)
    try:
        return run_nodes(cluster.start, restarts=job.options["restarts"])
    finally:
        cluster.release()
        ray.shutdown()


class _Cluster:
    """The bundles of a Ray cluster that a job holds."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.group: Any = None

    def start(self, stopped: Callable[[], bool]) -> Sequence[Node]:
        """Place an actor in each bundle and start its node's launcher; return no node if stopped before."""
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

        self.release()
        wanted = bundle(self.job)
        if not self._place(wanted, stopped):
            return []
        actor = ray.remote(NodeActor)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        placed = placement_group_table(self.group)["bundles_to_node_id"]
        nodes = []
        for place in range(self.job.num_nodes):
            bundled = actor.options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=InGroup(self.group, placement_group_bundle_index=place),
            )
            nodes.append(_RayNode(bundled.remote(), place, addresses[placed[place]]))
        self._start_launchers(nodes)
        return nodes

    def release(self) -> None:
        """Release the bundles; their actors exit."""
        from ray.util import remove_placement_group

        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def _place(self, wanted: dict[str, float], stopped: Callable[[], bool]) -> bool:
        """Wait until the cluster has room for all bundles; return False if stopped before."""
        import ray
        from ray.util import placement_group

        self.group = placement_group([wanted] * self.job.num_nodes, strategy="SPREAD")
        told_at = time.monotonic()
        while not self.group.wait(timeout_seconds=1):
            if stopped():
                return False
            if time.monotonic() - told_at > NOTICE_EVERY_S:
                told_at = time.monotonic()
                have = {name: n for name, n in ray.cluster_resources().items() if name in ("CPU", "GPU")}
                line = (
                    f"waiting for {self.job.num_nodes} bundles of {wanted}; the cluster has {have} in total"
                )
                print(line, flush=True)
        return True

    def _start_launchers(self, nodes: Sequence[_RayNode]) -> None:
        import ray

        try:
            first = nodes[0].host
            port = ray.get(nodes[0].actor.free_port.remote(first), timeout=ANSWER_S * 4)
            starts = []
            for place, node in enumerate(nodes):
                variables = self.job.variables(node=place) | {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
                command = [self.job.python or "", *self.job.command()[1:]]
                starts.append(node.actor.start.remote(command, variables, str(self.job.folder)))
            ray.get(starts, timeout=ANSWER_S * 4)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            for node in nodes:
                node.lose(error)


class _RayNode:
    """The launcher of one bundle. Node 0's output is printed, other output is kept for errors."""

    def __init__(self, actor: Any, place: int, host: str) -> None:
        self.actor, self.place, self.host = actor, place, host
        self.lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self.is_lost = False

    def poll(self) -> int | None:
        import ray

        if self.is_lost:
            return LOST
        try:
            code, lines = ray.get(self.actor.poll.remote(), timeout=ANSWER_S)
        except ray.exceptions.ActorUnavailableError:
            return None  # Ray will find out if the actor has exited
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self.lose(error)
            return LOST
        if self.place == 0:
            for line in lines:
                print(line, flush=True)
        else:
            self.lines.extend(lines)
        return code

    def lose(self, error: Exception) -> None:
        self.is_lost = True
        self.lines = collections.deque(str(error).splitlines()[:3])

    def send(self, name: str) -> None:
        if not self.is_lost:
            self.actor.send.remote(name)

    def close(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)


_MAX_LINES = 10_000
"""Lines kept until the driver reads them."""


class NodeActor:
    """One launcher, controlled by the driver of the job. It exits with this actor."""

    _launcher: AttachedProcess

    def free_port(self, address: str) -> int:
        """Return a free port of this node."""
        return free_ports(1, address=address)[0]

    def start(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        environment = child_environment(variables)
        for name in RANK_VARIABLES:
            environment.pop(name, None)
        python = command[0] or sys.executable
        words = [python, "-m", "crosstune.distributed.jobs.attached", python, *command[1:]]
        try:
            self._launcher = AttachedProcess(words, max_lines=_MAX_LINES, env=environment, cwd=folder)
        except OSError as error:
            raise UserError(
                f"Cannot start {python} in {folder} on {socket.gethostname()}.",
                why=str(error),
                do="start from a folder that all nodes share, and specify their Python with --python",
            ) from error

    def poll(self) -> tuple[int | None, list[str]]:
        """Return the exit code (None while it runs) and the lines since the last call."""
        code, waiting = self._launcher.poll(), self._launcher.lines
        return code, [waiting.popleft() for _ in range(len(waiting))]

    def send(self, name: str) -> None:
        """Send the launcher a signal by name."""
        self._launcher.send(name)
