"""`crosstune launch`: scripts, manifests and lines that other programs can read, with options that inject nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import BASE, printed, refused, write_tool

from crosstune.cli.commands.launch import make_parser
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.config.schema import option_list
from crosstune.distributed.jobs.job import load_scheduler, make_job, options_of_schedulers

NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch injected)",
    "`touch injected`",
    "${HOME}",
    "x; touch injected",
    "line\n#SBATCH --partition=other\ntouch injected",
    "- a: b # c",
    "back\\slash",
    "$(MASTER_ADDR) $$ $",
    "naïve ☃",
]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(scheduler: str, flags: list[str], *more: str) -> str:
    """Return the text for flags that train itself would refuse; `more` are words of launch."""
    own = make_parser().parse_args([*shlex.split(BASE[scheduler]), *more])
    job = make_job(own.on, vars(own), config=make_config(), words=flags, name="x", folder=Path.cwd())
    return str(load_scheduler(scheduler).write(job))


def directives(script: str) -> dict[str, str]:
    """Return the options that sbatch reads from a script: before the first line that is no comment."""
    found = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            [word] = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
    return found


def run_script(
    script: str, folder: Path, *, code: int = 0, state: str = "RUNNING", more: str = ""
) -> tuple[int, str]:
    """Run a batch script in a real bash. `srun` starts its command for node 1 and ends with `code`."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    write_tool(
        tools / "scontrol",
        'case "$1 $2" in "show hostnames") printf "alpha\\nbeta\\n";; "show node") echo "   NodeAddr=10.0.0.1 NodeHostName=$3";; '
        f'"show job") echo "   JobState={state} Reason=None";; requeue*) echo "requeue $2" >> requeued;; esac',
    )
    write_tool(
        tools / "srun",
        f'while [ "${{1#--}}" != "$1" ]; do shift; done\nSLURM_NODEID=1 "$@"\n{more}\nexit {code}',
    )
    write_tool(
        tools / "python",
        'printf "%s\\0" "$NODE_RANK" "$NNODES" "$NPROC_PER_NODE" "$MASTER_ADDR" "$MASTER_PORT" "$@" > seen',
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "alpha,beta",
            "RANK": "5",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("scheduler", BASE)
def test_the_flags_of_train_arrive_with_a_name_and_a_resume(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _train_words(scheduler, printed(f"{BASE[scheduler]} --model_name ORG/X --lr 1e-3", capsys))
    assert words[:4] == ["--model_name", "ORG/X", "--lr", "1e-3"]
    assert words[4] == "--name" and words[5].endswith("-X") and words[6:] == ["--resume", "auto"]
    own = printed(f"{BASE[scheduler]} --lr 1e-3 -- --name mine --resume runs/mine", capsys)
    assert _train_words(scheduler, own) == ["--lr", "1e-3", "--name", "mine", "--resume", "runs/mine"]


@needs_bash
@pytest.mark.parametrize("scheduler", BASE)
def test_values_inject_nothing(scheduler: str, tmp_path: Path) -> None:
    text = written(scheduler, ["--dataset", *NASTY])
    assert _train_words(scheduler, text)[: 1 + len(NASTY)] == ["--dataset", *NASTY]
    if scheduler == "slurm":
        assert "partition" not in directives(text)
        script = text.replace(shlex.quote(sys.executable), str(tmp_path / "tools" / "python"))
        assert run_script(script, tmp_path)[0] == 0
        seen = (tmp_path / "seen").read_bytes().decode().split("\0")
        assert seen[:4] == ["1", "2", "1", "10.0.0.1"] and 20000 <= int(seen[4]) < 32000
        assert seen[8 : 9 + len(NASTY)] == ["--dataset", *NASTY]
    assert not (tmp_path / "injected").exists()


def _train_words(scheduler: str, text: str) -> list[str]:
    """The words after `train` as the program that reads the text gets them."""
    if scheduler == "kubernetes":
        job = list(yaml.safe_load_all(text))[-1]
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        command = [word.replace("$$", "$") for word in command]  # as Kubernetes does
        assert command[:4] == ["python", "-m", "crosstune", "train"]
        return command[4:]
    if scheduler == "slurm":
        array = text.split("train=(", 1)[1].split("\n)\n", 1)[0]
        words = shlex.split(array)
    elif scheduler == "ray":
        words = shlex.split(_ray_script(text))
    else:
        lines = shlex.split(text, comments=True)
        words = shlex.split(lines[3 if "-t" in lines else 0])
    after = "--" if scheduler == "ray" else "train"
    return words[words.index(after) + 1 :]


def _ray_script(text: str) -> str:
    """The script that the printed `ray job submit` starts."""
    return text.split("<<'END_OF_SCRIPT'\n", 1)[1].split("\nEND_OF_SCRIPT\n", 1)[0]


@needs_bash
@pytest.mark.parametrize("join", [shlex.join, subprocess.list2cmdline])
def test_however_ray_joins_the_entrypoint(join: Callable[[list[str]], str], tmp_path: Path) -> None:
    tool = tmp_path / "my python"
    write_tool(tool, 'printf "%s\\0" "$@" > seen')
    text = written("ray", ["--dataset", *NASTY], "--python", str(tool))
    subprocess.run(
        ["bash", "-c", f"ray() {{ true; }}\n{text}"], cwd=tmp_path, check=True
    )  # writes the script
    words = shlex.split(text.splitlines()[-1])
    done = subprocess.run(["bash", "-c", join(words[words.index("--") + 1 :])], cwd=tmp_path, check=False)
    assert done.returncode == 0 and not (tmp_path / "injected").exists()
    seen = (tmp_path / "seen").read_bytes().decode().split("\0")
    place = seen.index("--dataset")
    assert seen[place : place + 1 + len(NASTY)] == ["--dataset", *NASTY]


@needs_bash
def test_lines_before_the_training_may_use_unset_variables(tmp_path: Path) -> None:
    text = written("slurm", [], "--before", "export SOME_PATH=/x:$SOME_PATH")
    script = text.replace(shlex.quote(sys.executable), str(tmp_path / "tools" / "python"))
    assert run_script(script, tmp_path) == (0, "")


@needs_bash
@pytest.mark.parametrize(
    ("words", "tool", "said"),
    [
        (f"{BASE['slurm']} --name r1", "sbatch", "sbatch did not answer"),
        (f"{BASE['kubernetes']} --name r1", "kubectl", "kubectl did not answer"),
        ("--on ssh --nnodes 1 --hosts alpha", "ssh", "ssh cannot log in to alpha"),
    ],
)
def test_a_cluster_that_hangs(
    words: str,
    tool: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tools").mkdir()
    write_tool(tmp_path / "tools" / tool, "exec sleep 100000")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    monkeypatch.setattr("crosstune.distributed.jobs.job.ANSWER_S", 0.5)
    monkeypatch.setattr("crosstune.distributed.jobs.schedulers.ssh.LOGIN_S", 0.2)
    assert main(["launch", *shlex.split(words)]) == 2
    error = capsys.readouterr().err
    assert said in error


@needs_bash
@pytest.mark.parametrize(
    ("code", "state", "flags", "requeued"),
    [
        (0, "RUNNING", "", False),
        (2, "RUNNING", "", False),
        (3, "RUNNING", "", True),
        (3, "CANCELLED", "", False),
        (3, "RUNNING", "--time_limit 1h", False),
    ],
)
def test_a_stopped_job_is_queued_again_unless_its_user_cancelled_it(
    code: int, state: str, flags: str, requeued: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = printed(f"{BASE['slurm']} --python {tmp_path}/tools/python {flags}", capsys)
    assert run_script(script, tmp_path, code=code, state=state)[0] == code
    assert (tmp_path / "requeued").exists() == requeued


@needs_bash
def test_a_signal_to_the_script_reaches_the_step_and_queues_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also when the run has its own time limit, and when it was too young to save a checkpoint."""
    script = printed(f"{BASE['slurm']} --time_limit 1h --python {tmp_path}/tools/python", capsys)
    more = "trap 'touch passed; exit 138' USR1\nkill -USR1 $PPID\nfor i in $(seq 600); do sleep 0.05; done"
    code, err = run_script(script, tmp_path, code=9, more=more)
    assert (code, err.strip()) == (3, "")
    assert (tmp_path / "passed").exists() and (tmp_path / "requeued").read_text() == "requeue 77\n"


def test_what_slurm_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--gpus 8 --partition gpu --account me --time 1-12 --cpus 32 --memory 400G --grace 300 --logs a/b --sbatch exclusive --sbatch reservation=x"
    found = directives(printed(f"{BASE['slurm']} --name 'two words' {options}", capsys))
    expected = {
        "job-name": "two-words",
        "chdir": str(tmp_path),
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "partition": "gpu",
        "account": "me",
        "time": "1-12",
        "cpus-per-task": "32",
        "mem": "400G",
        "signal": "B:USR1@300",
        "output": "a/b/two-words-%j.out",
        "open-mode": "append",
        "requeue": "",
        "exclusive": "",
        "reservation": "x",
    }
    assert found == expected


def test_the_processes_of_a_machine_follow_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(f"{BASE['slurm']} --gpus 8", capsys)
    assert "NPROC_PER_NODE=8" in script
    assert directives(printed(f"{BASE['slurm']} --nproc-per-node 4", capsys))["gpus-per-node"] == "4"
    assert "gpus-per-node" not in directives(
        printed(f"{BASE['slurm']} --backend cpu --nproc_per_node 4", capsys)
    )


def test_the_lines_for_ssh(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        line for line in printed(f"{BASE['ssh']} --gpus 4", capsys).splitlines() if not line.startswith("#")
    ]
    first, second = map(shlex.split, lines)
    assert first[:3] == ["ssh", "-t", "alpha"] and second[:5] == ["ssh", "-t", "-p", "2222", "root@beta"]
    for place, line in enumerate((first, second)):
        words = shlex.split(line[-1])
        assert words[:2] == ["cd", str(tmp_path)]
        wanted = {
            "NNODES=2",
            "NPROC_PER_NODE=4",
            f"NODE_RANK={place}",
            "MASTER_ADDR=alpha",
            "MASTER_PORT=29500",
        }
        assert wanted <= set(words)


def test_the_line_for_ray_is_accepted_by_launch(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(f"{BASE['ray']} --gpus 2 --cpus 8 --lr 1e-3", capsys)
    inner = shlex.split(_ray_script(text))
    again = printed(inner[inner.index("launch") + 1 :], capsys)
    assert again == text and "2 bundles of {'CPU': 8.0, 'GPU': 2.0}" in text


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


def test_no_option_hides_one_of_train() -> None:
    """Those of the meeting point mean the same."""
    names = {name for option in option_list() for name in (option.name, *option.aliases)}
    assert names & {option.name for option in options_of_schedulers()} <= {"master_addr", "master_port"}


@pytest.mark.parametrize("scheduler", BASE)
def test_no_secret_is_written(
    scheduler: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = "hf_" + "aB3" * 12
    monkeypatch.setenv("HF_TOKEN", token)
    assert token not in printed(BASE[scheduler], capsys)
    (tmp_path / "run.yaml").write_text(f"lr: 1e-3  # {token}\n")
    for flags in (f"--dataset https://user:{token}@host/x", "--config run.yaml"):
        error = refused(f"{BASE[scheduler]} {flags}", capsys)
        assert "token" in error and token not in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--on slurm --nnodes 0", "--nnodes cannot be '0'"),
        ("--on slurm --nnodes 2 --backend cpu --gpus 2", "--gpus 2 cannot be combined with --backend cpu"),
        ("--on ssh --nnodes 1 --hosts a,b", "--nnodes is 1, but 2 nodes"),
        ("--on ssh --nnodes 1 --hosts 'a;b'", "is not a valid host"),
        ("--on kubernetes --nnodes 2 --image x", "needs --volume"),
        ("--on slurm --nnodes 2 --image x", "--image is an option of kubernetes"),
        ("--on slurm --nnodes 2 --partition 'a b'", "--partition cannot be"),
        ("--on slurm --nnodes 2 --gpus 1 --nproc_per_node 2", "--gpus 1 is too few"),
        ("--on slurm --nnodes 2 -- --lr fast", "lr"),
        ("--on slurm --nnodes 2 --overwrite", "--overwrite cannot be combined"),
        ("--on slurm --nnodes 2 --resume runs/x/checkpoints/step-00000020", "cannot be combined with launch"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_submitted(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(words, capsys)


@needs_bash
def test_a_machine_without_the_folder_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    write_tool(tmp_path / "tools" / "ssh", "echo 'cd: no such folder' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    assert main(["launch", *shlex.split("--on ssh --nnodes 1 --hosts alpha")]) == 2
    error = capsys.readouterr().err
    assert f"alpha does not have the folder {tmp_path}" in error and "cd: no such folder" in error


@needs_bash
@pytest.mark.parametrize(
    ("scheduler", "tool", "answer", "said"),
    [
        ("slurm", "sbatch", "echo 4711", ["submitted job 4711", "scancel 4711"]),
        ("kubernetes", "kubectl", "echo created", ["submitted job r1", "kubectl logs"]),
    ],
)
def test_what_is_submitted_is_what_is_printed(
    scheduler: str,
    tool: str,
    answer: str,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "tools").mkdir()
    write_tool(tmp_path / "tools" / tool, f"cat > {tmp_path}/given; {answer}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    words = f"{BASE[scheduler]} --name r1"
    assert main(["launch", *shlex.split(words)]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in said)
    assert (tmp_path / "given").read_text() == printed(words, capsys)
    write_tool(tmp_path / "tools" / tool, "echo 'no such queue' >&2; exit 1")
    assert main(["launch", *shlex.split(words)]) == 2
    assert "no such queue" in capsys.readouterr().err
