"""Climb a ladder: measure the baseline, try each rung on top of the kept changes, and compare the final options with the
original ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from crosstune.config.load import make_config
from crosstune.config.options.training import AUTO
from crosstune.config.resolve.plan import Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.files.json_files import read_object
from crosstune.ladder.compare import (
    TURNS,
    Comparison,
    Criterion,
    Goal,
    Verdict,
    check_criteria,
    compare,
    judge,
)
from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation
from crosstune.ladder.rungs import all_rungs
from crosstune.ladder.trial import Trial, Trials
from crosstune.planner.gather import gather
from crosstune.report.files import mapping, number
from crosstune.runs.trials import PLACE

NOT_CARRIED = (*PLACE, "resume", "num_epochs", "max_steps", "profile")
"""Options that trials drop; the last three return in train.yaml."""


def make_request(config: Config, *, rungs: Sequence[str], steps: int, goal: str) -> dict[str, Any]:
    """Return the request that identifies a ladder in its folder."""
    options = {name: value for name, value in config.options_asked().items() if name not in PLACE}
    return {"options": options, "rungs": list(rungs), "steps": steps, "goal": goal}


Outcome = Literal["kept", "rolled back", "does not apply"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change that was tried, and its outcome."""

    rung: str
    title: str
    outcome: Outcome
    why: str
    promise: str = ""
    change: Change = field(default_factory=dict)
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        shown = {name: value for name, value in vars(self).items() if name != "comparison"}
        return shown | {"measured": self.comparison.to_json() if self.comparison else None}


@dataclass(frozen=True, kw_only=True)
class Climbed:
    """The result of a ladder."""

    asked: Mapping[str, Any]
    options: Mapping[str, Any]
    """The options to train with: the requested options with the kept changes."""
    steps: Sequence[Step]
    ends: Comparison | None
    """The original options against the final options; None if nothing was kept."""
    criteria: Sequence[Criterion]

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "options": self.options,
            "rungs": [step.to_json() for step in self.steps],
            "ends": self.ends.to_json() if self.ends else None,
            "criteria": [asdict(criterion) for criterion in self.criteria],
        }


@dataclass(kw_only=True)
class Ladder:
    """The state of a climb: the options kept so far and the steps."""

    asked: Mapping[str, Any]
    """Options of the baseline."""
    rungs: Sequence[str]
    trials: Trials
    goal: Goal = "speed"
    on_step: Callable[[Step], None] = lambda step: None
    on_trial: Callable[[str, int], None] = lambda name, left: None
    """Called before each trial with its name and the most trials left."""
    kept: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def climb(self) -> Climbed:
        """Try all rungs, then compare both ends and validate the final options with checkpoints."""
        baseline = self._baseline()
        known = all_rungs()
        for place, name in enumerate(self.rungs):
            self._try_rung(name, known[name], baseline, left=len(self.rungs) - place)
        base, now = self._base(), self._now()
        ends = self._compare("ends", base=base, new=now, left=0) if now != base else None
        self.on_trial("validation", 1)
        every = max(1, self.trials.steps // 3)
        validation = self.trials.run("validation", now, save_steps=every, keep_last_n=3)
        return Climbed(
            asked=self.asked,
            options={**self.asked, **self.kept},
            steps=self.steps,
            ends=ends,
            criteria=check_criteria(ends, validation, validated=self.trials.folder / validation.name),
        )

    def _base(self) -> dict[str, Any]:
        return {name: value for name, value in self.asked.items() if name not in NOT_CARRIED}

    def _now(self) -> dict[str, Any]:
        return {**self._base(), **self.kept}

    def _baseline(self) -> Trial:
        """Run the original options once, and adopt the batch size that `--batch_size auto` found."""
        self.on_trial("baseline", len(TURNS) * (len(self.rungs) + 1) + 2)
        trial = self.trials.run("baseline", self._base())
        if not trial.finished:
            raise UserError(
                "The run fails with the original options.",
                why=trial.error,
                do=f"make it run with `crosstune train` first; its output is {self.trials.folder / 'baseline.log'}",
            )
        found = mapping(self._recorded(trial).get("options")).get("batch_size")
        if "batch_size" in self.asked and make_config(**self._base()).batch_size == AUTO:
            self.asked = {**self.asked, "batch_size": found}  # rungs multiply and divide it
        return trial

    def _try_rung(self, name: str, rung: Rung, baseline: Trial, *, left: int) -> None:
        def note(outcome: Outcome, why: str, **more: Any) -> None:
            step = Step(
                rung=name, title=rung.title, promise=rung.promise.text, outcome=outcome, why=why, **more
            )
            self.steps.append(step)
            self.on_step(step)

        try:
            changes = rung.propose(self._situation(baseline))
        except NotApplicable as reason:
            note("does not apply", str(reason))
            return
        for place, change in enumerate(changes, start=1):
            new, comparison = {**self._now(), **change}, None
            try:
                _plan(new)
            except UserError as error:
                verdict = Verdict(False, f"rejected: {error.message} {error.why}".strip())
            else:
                comparison = self._compare(f"{name}-{place}", base=self._now(), new=new, left=left)
                verdict = judge(comparison, promise=rung.promise, gain=rung.gain, goal=self.goal)
            note("kept" if verdict.kept else "rolled back", verdict.why, change=change, comparison=comparison)
            if not verdict.kept:
                break
            self.kept.update(change)

    def _compare(
        self, name: str, *, base: Mapping[str, Any], new: Mapping[str, Any], left: int
    ) -> Comparison:
        most = len(TURNS) * (left + 1) + 1
        return compare(
            self.trials, name, base=base, new=new, on_trial=lambda trial: self.on_trial(trial, most)
        )

    def _situation(self, baseline: Trial) -> Situation:
        data = mapping(mapping(self._recorded(baseline).get("data")).get("train"))
        examples, tokens = number(data.get("examples")) or 0.0, number(data.get("tokens")) or 0.0
        plan = _plan(self._now())
        return Situation(
            config=plan.config,
            plan=plan,
            mean_tokens=tokens / examples if examples else 0.0,
            longest_tokens=int(number(data.get("longest")) or 0),
        )

    def _recorded(self, baseline: Trial) -> Mapping[str, Any]:
        return read_object(self.trials.folder / baseline.name / "plan.json")


def _plan(options: Mapping[str, Any]) -> Plan:
    config = make_config(**options)
    return resolve(config, gather(config))
