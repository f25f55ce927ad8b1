"""Save how to use a trained judge beside its weights, and read it back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.json_fields import FLAG, TEXT, Rule, check_fields, real
from crosstune.core.json_files import read_json, write_json
from crosstune.recipes.judge.scale import read_scale
from crosstune.recipes.judge.verdicts import FORMATS, VerdictFormat

SETTINGS_FILE = "judge.json"
_FIELDS = {
    "verdict": Rule(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS),
    "scale": TEXT,
    "explains": FLAG,
    "head": Rule("tokens or scalar", lambda value: value in ("tokens", "scalar")),
    "temperature": real(0),
}


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    verdict: str
    scale: str
    explains: bool = False
    head: str = "tokens"
    temperature: float = 1.0
    """Divides the log probabilities of the labels, to calibrate the confidence; fitted on the validation items."""

    def format(self) -> VerdictFormat:
        return VerdictFormat(name=self.verdict, scale=read_scale(self.scale), explains=self.explains)

    def write(self, folder: Path) -> None:
        write_json(folder / SETTINGS_FILE, asdict(self))


def read_judge_settings(folder: Path) -> JudgeSettings | None:
    """Return the settings beside the weights of a judge; None if there are none."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return None
    written = read_json(path)
    check_fields(written, _FIELDS, source=path)
    missing = [name for name in ("verdict", "scale") if name not in written]
    if missing:
        raise UserError(f"{path} does not say the {missing[0]} of the judge.", do="train the judge again")
    return JudgeSettings(**{name: written[name] for name in _FIELDS if name in written})
