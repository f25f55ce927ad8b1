"""Kubernetes: an indexed Job with one pod per node, and a headless Service that gives the first pod a name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from crosstune.core.errors import EXIT_STOPPED, EXIT_USER_MUST_ACT, UserError
from crosstune.distributed.jobs.job import (
    CPUS,
    MEMORY,
    PORT,
    RESTARTS,
    Job,
    JobOption,
    Started,
    fill,
    matches,
    submit,
)

_LABEL = matches(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and dashes")
_NAME = matches(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, dashes and dots")
IMAGE = JobOption(
    "image",
    "IMAGE",
    "container image with crosstune installed",
    check=matches(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a name such as registry.example/team/crosstune:0.1"),
)
NAMESPACE = JobOption("namespace", "NAME", "namespace of the job (default: kubectl's)", check=_LABEL)
VOLUME = JobOption(
    "volume",
    "CLAIM:PATH",
    "volume claim that all pods share, and where it is mounted; runs start in that folder",
    check=matches(
        r"[a-z0-9][a-z0-9.-]*:/[^:\s]*", "the name of a claim and an absolute path, such as runs:/workspace"
    ),
)
SECRET = JobOption(
    "secret",
    "NAME",
    "secret whose keys become environment variables, such as HF_TOKEN (may be repeated)",
    repeats=True,
    check=_NAME,
)
GPU_RESOURCE = JobOption(
    "gpu_resource",
    "NAME",
    "resource name of the GPUs (default: nvidia.com/gpu)",
    default="nvidia.com/gpu",
    check=matches(
        r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*", "a name such as nvidia.com/gpu or amd.com/gpu"
    ),
)
OPTIONS = (IMAGE, NAMESPACE, VOLUME, SECRET, GPU_RESOURCE, CPUS, MEMORY, PORT, RESTARTS)

LONGEST_NAME = 52
"""A host name has at most 63 characters; Kubernetes appends the index and a suffix."""
CONFIG_FOLDER = "/etc/crosstune"


def check(job: Job) -> Iterator[UserError]:
    """Reject a job without an image or a volume."""
    if job.options["image"] is None:
        yield UserError(
            "--on kubernetes needs --image.", do="specify a container image with crosstune installed"
        )
    if job.options["volume"] is None:
        yield UserError(
            "--on kubernetes needs --volume CLAIM:PATH.",
            why="all pods need the same folder, and a pod that is restarted elsewhere its checkpoints.",
            do="specify a claim that several nodes can mount (access mode ReadWriteMany)",
        )


def write(job: Job) -> str:
    """Return the manifest."""
    claim, _, path = job.options["volume"].partition(":")
    command = job.command(
        python="python", config_file=f"{CONFIG_FOLDER}/run.yaml" if job.config_text else None
    )
    memory = job.options["memory"]
    resources = {
        job.options["gpu_resource"]: job.num_gpus,
        "cpu": job.options["cpus"],
        "memory": f"{memory}i" if memory else None,
    }
    return fill(
        "kubernetes.yaml.jinja",
        job=job,
        name=object_name(job.name),
        claim=claim,
        path=path,
        # Kubernetes replaces $(NAME) in these words, and reads $$ as $.
        command=[word.replace("$", "$$") for word in command],
        config_folder=CONFIG_FOLDER,
        resources={key: amount for key, amount in resources.items() if amount},
        stopped=EXIT_STOPPED,
        user_must_act=EXIT_USER_MUST_ACT,
    )


def start(job: Job) -> Started:
    """Submit the job with kubectl."""
    name = object_name(job.name)
    where = f" --namespace {job.options['namespace']}" if job.options["namespace"] else ""
    delete = f"kubectl delete job,service,configmap --ignore-not-found {name}{where}"
    submit(
        ["kubectl", "apply", "--filename=-"],
        write(job),
        where="install kubectl and point it to the cluster, or add --print and apply the manifest where it is",
        do=f"if a job of this name exists, choose a different --name or remove it: {delete}",
    )
    return Started(
        lines=(
            f"submitted job {name}: {job.num_nodes} x {job.num_local} processes, run {job.name}",
            f"state     kubectl get pods --selector job-name={name}{where}",
            f"progress  kubectl logs --follow --selector "
            f"job-name={name},batch.kubernetes.io/job-completion-index=0{where}",
            f"remove    {delete}",
        )
    )


def object_name(name: str) -> str:
    """Turn the name of a run into a DNS label that starts with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        label = f"run-{label}".rstrip("-")
    return label[:LONGEST_NAME].rstrip("-")
