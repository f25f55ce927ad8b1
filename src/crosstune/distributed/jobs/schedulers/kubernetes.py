"""Kubernetes: write an indexed Job, one pod per machine, with a headless Service through which the pods find the first."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import yaml

from crosstune.core.errors import EXIT_STOPPED, EXIT_USER_MUST_ACT, UserError
from crosstune.distributed.jobs.job import Job, Started
from crosstune.distributed.jobs.option import CPUS, MEMORY, PORT, RESTARTS, JobOption, matches

_LABEL = matches(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and dashes")
_NAME = matches(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, dashes and dots")
IMAGE = JobOption(
    name="image",
    metavar="IMAGE",
    text="container image with crosstune in it",
    check=matches(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a name such as registry.example/team/crosstune:0.1"),
)
NAMESPACE = JobOption(
    name="namespace", metavar="NAME", text="namespace of the job (default: that of kubectl)", check=_LABEL
)
VOLUME = JobOption(
    name="volume",
    metavar="CLAIM:PATH",
    text="volume claim that all pods share, and where it is mounted; runs start in that folder",
    check=matches(
        r"[a-z0-9][a-z0-9.-]*:/[^:\s]*", "the name of a claim and an absolute path, such as runs:/workspace"
    ),
)
SECRET = JobOption(
    name="secret",
    metavar="NAME",
    text="secret whose keys become environment variables, such as HF_TOKEN (may be repeated)",
    repeats=True,
    check=_NAME,
)
GPU_RESOURCE = JobOption(
    name="gpu_resource",
    metavar="NAME",
    text="resource name of the GPUs (default: nvidia.com/gpu)",
    default="nvidia.com/gpu",
    check=matches(
        r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*", "a name such as nvidia.com/gpu or amd.com/gpu"
    ),
)
OPTIONS = (IMAGE, NAMESPACE, VOLUME, SECRET, GPU_RESOURCE, CPUS, MEMORY, PORT, RESTARTS)

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
LONGEST_NAME = 52
"""Of 63 characters in a host name; the rest is for the index and what Kubernetes adds."""
GRACE_S = 120
"""Time for a checkpoint between SIGTERM and SIGKILL."""
CONTAINER = "train"
CONFIG_FOLDER = "/etc/crosstune"


def check(job: Job) -> list[UserError]:
    """Return the problems of a job that the options alone do not show."""
    problems = []
    if job.options[IMAGE.name] is None:
        problems.append(
            UserError("--on kubernetes needs --image.", do="name a container image that has crosstune in it")
        )
    if job.options[VOLUME.name] is None:
        problems.append(
            UserError(
                "--on kubernetes needs --volume CLAIM:PATH.",
                why="a pod that is started again elsewhere must find its checkpoints, and all pods the same folder.",
                do="name a claim that can be mounted by several machines (access mode ReadWriteMany)",
            )
        )
    return problems


def write(job: Job) -> str:
    """Return the manifest of a job."""
    name = object_name(job.name)
    documents = [
        _service(job, name),
        *((_config_map(job, name),) if job.config_text else ()),
        _job(job, name),
    ]
    return yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True)


def start(job: Job) -> Started:
    """Submit a job with kubectl."""
    if shutil.which("kubectl") is None:
        raise UserError(
            "Cannot submit the job: there is no kubectl on this machine.",
            do="install kubectl and point it to the cluster, or add --print and apply the manifest where it is",
        )
    done = subprocess.run(
        ["kubectl", "apply", "--filename=-"], input=write(job), text=True, capture_output=True, check=False
    )
    name = object_name(job.name)
    where = f" --namespace {job.options[NAMESPACE.name]}" if job.options[NAMESPACE.name] else ""
    delete = f"kubectl delete job,service,configmap --ignore-not-found {name}{where}"
    if done.returncode:
        raise UserError(
            "kubectl refused the job.",
            why=done.stderr.strip() or f"exit code {done.returncode}",
            do=f"if a job of this name exists, choose another --name or remove it: {delete}",
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
    """Return the name of a run as a DNS label, which starts with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        label = f"run-{label}".rstrip("-")
    return label[:LONGEST_NAME].rstrip("-")


def _metadata(job: Job, name: str) -> dict[str, Any]:
    namespace = job.options[NAMESPACE.name]
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {"app.kubernetes.io/name": "crosstune", "app.kubernetes.io/instance": name},
    }


def _service(job: Job, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the pods meet before any of them is ready
            "selector": {"job-name": name},
            "ports": [{"name": "master", "port": job.options[PORT.name]}],
        },
    }


def _config_map(job: Job, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, name),
        "data": {"run.yaml": job.config_text},
    }


def _job(job: Job, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, name),
        "spec": {
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            "completionMode": "Indexed",
            # When one pod fails, the others lose it and fail too: each counts.
            "backoffLimit": job.options[RESTARTS.name] * job.num_nodes,
            "podFailurePolicy": {"rules": _failure_rules(job)},
            "template": {
                "metadata": {"labels": _metadata(job, name)["labels"]},
                "spec": _pod(job, name),
            },
        },
    }


def _failure_rules(job: Job) -> list[dict[str, Any]]:
    """Return what to do when a pod ends: give up on a request that cannot work, and start a stopped one again for free."""

    def on_code(action: str, code: int) -> dict[str, Any]:
        codes = {"containerName": CONTAINER, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": codes}

    return [
        on_code("FailJob", EXIT_USER_MUST_ACT),
        # With a time limit of its own, the run ends with the same code and is not to be continued.
        on_code("FailJob" if job.has_time_limit else "Ignore", EXIT_STOPPED),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _pod(job: Job, name: str) -> dict[str, Any]:
    claim, _, path = job.options[VOLUME.name].partition(":")
    return {
        "subdomain": name,
        "restartPolicy": "Never",  # the failure rules need it; the Job makes a new pod instead
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [_container(job, name, path)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL needs more than the default 64 MB
            *(({"name": "config", "configMap": {"name": name}},) if job.config_text else ()),
        ],
    }


def _container(job: Job, name: str, path: str) -> dict[str, Any]:
    address = {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(job.options[PORT.name])}
    command = job.command(
        python="python", config_file=f"{CONFIG_FOLDER}/run.yaml" if job.config_text else None
    )
    resources: dict[str, Any] = {}
    if job.num_gpus:
        resources[job.options[GPU_RESOURCE.name]] = job.num_gpus
    if job.options[CPUS.name]:
        resources["cpu"] = job.options[CPUS.name]
    if job.options[MEMORY.name]:
        resources["memory"] = f"{job.options[MEMORY.name]}i"
    return {
        "name": CONTAINER,
        "image": job.options[IMAGE.name],
        # Kubernetes replaces $(NAME) in these words, and reads $$ as $.
        "command": [word.replace("$", "$$") for word in command],
        "workingDir": path,
        "env": [
            *({"name": key, "value": value} for key, value in (job.variables() | address).items()),
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        ],
        **(
            {"envFrom": [{"secretRef": {"name": item}} for item in job.options[SECRET.name]]}
            if job.options[SECRET.name]
            else {}
        ),
        **({"resources": {"limits": resources, "requests": dict(resources)}} if resources else {}),
        "volumeMounts": [
            {"name": "shared", "mountPath": path},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},) if job.config_text else ()),
        ],
    }
