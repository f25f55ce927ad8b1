"""The Kubernetes manifest of `crosstune launch`: what is in it, and that it fits the schema."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import BASE, printed

from crosstune.distributed.jobs.schedulers.kubernetes import object_name

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def manifest(words: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(printed(words, capsys)))


def test_the_manifest_of_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 8 --cpus 16 --memory 200G --namespace team --secret hub --secret wandb --restarts 2 --name 'My Run'"
    service, job = manifest(f"{BASE['kubernetes']} {options}", capsys)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} == {"job-name": "my-run"}
    assert job["metadata"]["namespace"] == service["metadata"]["namespace"] == "team"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["backoffLimit"] == 4 and pod["restartPolicy"] == "Never" and pod["subdomain"] == "my-run"
    values = {item["name"]: item.get("value") for item in container["env"]}
    assert values == {
        "NNODES": "2",
        "NPROC_PER_NODE": "8",
        "MASTER_ADDR": "my-run-0.my-run",
        "MASTER_PORT": "29500",
        "NODE_RANK": None,
    }
    limits = {"nvidia.com/gpu": 8, "cpu": 16, "memory": "200Gi"}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}, {"secretRef": {"name": "wandb"}}]
    assert container["workingDir"] == "/workspace"
    assert pod["volumes"][0] == {"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}}


@pytest.mark.parametrize(("flags", "stopped"), [("", "Ignore"), ("--time_limit 1h", "FailJob")])
def test_what_kubernetes_does_with_exit_codes(
    flags: str, stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, job = manifest(f"{BASE['kubernetes']} {flags}", capsys)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert codes == {2: "FailJob", 3: stopped}


def test_a_configuration_file_travels_in_the_manifest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1e-3\nname: from-file\n")
    _, config, job = manifest(f"{BASE['kubernetes']} --config run.yaml --max_steps 5", capsys)
    assert config["data"] == {"run.yaml": "lr: 1e-3\nname: from-file\n"}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[4:] == ["--config", "/etc/crosstune/run.yaml", "--max_steps", "5", "--resume", "auto"]
    assert job["metadata"]["name"] == config["metadata"]["name"] == "from-file"


def test_the_manifest_fits_the_schema_of_kubernetes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="the test extra is not installed")
    (tmp_path / "run.yaml").write_text("lr: 1e-3\n")
    full = "--config run.yaml --gpus 8 --cpus 16 --memory 200G --namespace team --secret hub"
    for document in manifest(f"{BASE['kubernetes']} {full}", capsys):
        for version in ("1.31", "1.37"):
            validator.validate(document, version, strict=True)
    wrong = manifest(BASE["kubernetes"], capsys)[-1]
    wrong["spec"]["completion"] = 2
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, version, strict=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("My Run_2", "my-run-2"),
        ("20261116-x", "run-20261116-x"),
        ("a" * 80, "a" * 52),
    ],
)
def test_the_name_of_a_run_as_a_host_name(name: str, expected: str) -> None:
    assert object_name(name) == expected
