"""Publish a run on the Hugging Face hub: stage its files without local paths and secrets, then upload them."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer
from crosstune.core.safe_text import redact, redact_values
from crosstune.files.hub_connection import why_unreachable
from crosstune.files.json_files import read_json, write_json
from crosstune.models.adapter_files import PROCESSOR_FILES, SETTINGS, TOKENIZER_FILES
from crosstune.models.bundled import BUNDLED, SMOLLM2_HUB
from crosstune.models.identity import RECORD
from crosstune.results.export import cached_export
from crosstune.runs.open_parts import find_model
from crosstune.runs.trained_folder import Trained

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-])){0,95}"
HUB_ID = re.compile(f"{_PART}/{_PART}")
_PATH = re.compile(r"file://|[/~\\]|[A-Za-z]:[/\\]|\.{1,2}[/\\]")
"""The beginning of a local path."""
_NAMES = ("_name_or_path", "name_or_path", "vocab_file", "merges_file", "tokenizer_file")
"""Fields of settings with the folder that a model or tokenizer was read from."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
_SETTINGS = (SETTINGS, RECORD, "config.json", "added_tokens.json", "vocab.txt", "spiece.model")
_PUBLISHED = (*_WEIGHTS, *_SETTINGS, *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Files with other names, such as notes or rows, stay here."""
_KEPT_RECORD = ("base", "quantization", "precision", "add_tokens", "rope_scaling", "new_blocks")


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    target: str
    repo: str
    what: str = "adapter"
    base: str | None = None
    """The hub id of the base model, if the run records only a local folder."""
    public: bool = False


def check_push(request: PushRequest, trained: Trained) -> None:
    """Raise a UserError for a request that cannot be pushed."""
    if not HUB_ID.fullmatch(request.repo):
        raise UserError(f"{shown(request.repo)} is not a name on the hub.", do="pass --to ORG/NAME")
    if request.base is not None and not HUB_ID.fullmatch(request.base):
        raise UserError(f"--base {shown(request.base)} is not a name on the hub.", do="pass --base ORG/NAME")
    if not trained.is_run:
        raise UserError(f"{request.target} is not a run.", do="pass a run folder, such as runs/NAME")
    assert trained.home is not None
    _check_links(trained.home)
    if request.what == "adapter" and trained.adapter is None:
        raise UserError(
            f"The run {request.target} has no adapter.",
            why="it trained a whole model.",
            do="use --what merged (the whole model), or --what gguf",
        )
    if request.what == "adapter" and "/" not in base_on_hub(request, trained):
        raise UserError(
            f"The base model of {request.target} is not on the hub.",
            why=f"an adapter refers to its base by a hub id; this run was trained on {Path(trained.base).name}.",
            do="pass the hub id of the same weights with --base ORG/NAME, or use --what merged",
        )


def _check_links(run: Path) -> None:
    """Raise a UserError for a link that leads out of the run: it would publish a file that the sender of a run chose."""
    for path in (path for name in ("adapter", "model") for path in (run / name, *(run / name).rglob("*"))):
        if path.is_symlink() and not path.resolve().is_relative_to(run.resolve()):
            raise UserError(
                f"{path} cannot be published.",
                why=f"it is a link to {path.resolve()}, outside of the run.",
                do="put the file itself there, or remove the link",
            )


def base_on_hub(request: PushRequest, trained: Trained) -> str:
    """Return the hub id of the base model, or its bare name if there is none."""
    plan = read_json(Path(request.target).expanduser() / "plan.json")
    recorded = str(
        (trained.record.get("base") or {}).get("name") or (plan.get("model") or {}).get("name") or ""
    )
    name = request.base or recorded
    if name in BUNDLED:
        return SMOLLM2_HUB if name.startswith("smollm2") else name
    # A relative folder is relative to the directory where the run started; a hub model is recorded with its cache path.
    recorded_path = str((plan.get("model") or {}).get("path") or "")
    is_local = Path(name).expanduser().exists() or Path(recorded_path).parts[-2:] == Path(name).parts
    is_hub = HUB_ID.fullmatch(name) and (request.base is not None or not is_local)
    return name if is_hub else Path(name).name


def base_license(name: str) -> str | None:
    """Return the license of a hub model from its card, if the hub answers; None if unknown."""
    if name == SMOLLM2_HUB:
        return "apache-2.0"
    if "/" not in name:
        return None
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE or why_unreachable(constants.ENDPOINT) is not None:
        return None
    try:
        card = HfApi().model_info(name).card_data
    except (errors.HTTPError, errors.HFValidationError, OSError):
        return None
    found = getattr(card, "license", None)
    return found if isinstance(found, str) else None


def stage_files(request: PushRequest, trained: Trained, folder: Path, *, observer: Observer) -> list[str]:
    """Write the files to publish, all but the card, into an empty folder; return their names."""
    if request.what == "adapter":
        assert trained.adapter is not None
        source = trained.adapter
    else:
        model = find_model(make_config(**trained.options()), observer)
        to = "hf" if request.what == "merged" else "gguf"
        source = cached_export(request.target, trained, model, to, observer=observer)
    if source.is_file():
        shutil.copyfile(source, folder / f"{request.repo.partition('/')[2]}.gguf")
    else:
        for path in sorted({path for pattern in _PUBLISHED for path in source.glob(pattern)}):
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, folder / path.name)
        for path in folder.glob("*.json"):
            if path.name != "tokenizer.json":
                _clean(path, base=base_on_hub(request, trained))
        for path in folder.glob("*.jinja"):
            path.write_text(redact(path.read_text(encoding="utf-8")), encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())


def _clean(path: Path, *, base: str) -> None:
    """Rewrite a settings file without local paths and secrets; the base becomes its hub id."""
    data = read_json(path, foreign=True)
    if path.name == RECORD:
        data = {name: data[name] for name in _KEPT_RECORD if name in data}
        if isinstance(data.get("base"), dict):  # the bundled weights are not exactly those of the hub
            kept = {} if data["base"].get("name") in BUNDLED else data["base"]
            data["base"] = kept | {"name": base}
    if "base_model_name_or_path" in data:
        data["base_model_name_or_path"] = base
    write_json(path, redact_values(_without_paths(data)))


def _without_paths(value: Any) -> Any:
    """Return plain data without the fields of local files, and with every local path replaced by its last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items() if key not in _NAMES}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and _PATH.match(value) and "\n" not in value and len(value) > 2:
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def check_token() -> None:
    """Raise a UserError unless the hub answers and accepts the token."""
    from huggingface_hub import HfApi, constants, get_token

    if get_token() is None:
        raise UserError(
            "Publishing needs a token of the Hugging Face hub.",
            why="there is none on this machine.",
            do="run `hf auth login` with a token with write access, or set HF_TOKEN",
        )
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
    if reason is not None:
        raise UserError(
            "The hub cannot be reached.", why=f"{reason}.", do="connect to the network, and try again"
        )
    with _explained("The hub rejects the token."):
        HfApi().whoami()


def upload(request: PushRequest, folder: Path, *, say: Callable[[str], None]) -> str:
    """Upload a staged folder in one commit and return its address. Files that the hub already has are not sent again."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained(f"Cannot push to {request.repo}."):
        api.create_repo(request.repo, private=not request.public, exist_ok=True)
        say(f"upload   {len(list(folder.iterdir()))} files to {request.repo}")
        done = api.upload_folder(
            repo_id=request.repo, folder_path=folder, commit_message="Upload a model trained with crosstune"
        )
    return str(getattr(done, "repo_url", "") or f"{api.endpoint}/{request.repo}")


@contextlib.contextmanager
def _explained(message: str) -> Iterator[None]:
    """Turn an error of the hub into a UserError."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        do = "run the same command again: files that have arrived are not sent again"
        if status in (401, 403):
            do = "run `hf auth login` with a token with write access to this organization"
        raise UserError(message, why=" ".join(lines[:2]), do=do) from error
