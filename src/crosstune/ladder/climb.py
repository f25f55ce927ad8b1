"""Climb the ladder: measure the baseline, try each rung on top of what was kept, and measure both ends again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from crosstune.config.load import make_config
from crosstune.config.options.training import AUTO
from crosstune.config.plan import Plan
from crosstune.config.resolve import resolve
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_object
from crosstune.ladder.compare import TURNS, Comparison, Goal, Verdict, compare, judge
from crosstune.ladder.criteria import Criterion, check_criteria
from crosstune.ladder.request import NOT_CARRIED
from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation
from crosstune.ladder.rungs import all_rungs
from crosstune.ladder.trial import Trial, Trials
from crosstune.planner.gather import gather
from crosstune.report.files import mapping, number

STATE = "ladder.json"
Outcome = Literal["kept", "rolled back", "does not apply"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rung, or one of several changes of a rung, and what came of it."""

    rung: str
    title: str
    outcome: Outcome
    why: str
    promise: str = ""
    change: Change = field(default_factory=dict)
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung,
            "title": self.title,
            "outcome": self.outcome,
            "why": self.why,
            "promise": self.promise,
            "change": dict(self.change),
            "measured": self.comparison.to_json() if self.comparison else None,
        }


@dataclass(frozen=True, kw_only=True)
class Climbed:
    """What a ladder found."""

    asked: Mapping[str, Any]
    options: Mapping[str, Any]
    """The options to train with: those that were asked for, and what was kept."""
    steps: Sequence[Step]
    ends: Comparison | None
    """The original options against the final ones; None if nothing was kept."""
    criteria: Sequence[Criterion]

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": dict(self.asked),
            "options": dict(self.options),
            "rungs": [step.to_json() for step in self.steps],
            "ends": self.ends.to_json() if self.ends else None,
            "criteria": [criterion.to_json() for criterion in self.criteria],
        }


@dataclass(kw_only=True)
class Ladder:
    asked: Mapping[str, Any]
    """Options of the baseline."""
    rungs: Sequence[str]
    trials: Trials
    goal: Goal = "speed"
    on_step: Callable[[Step], None] = lambda step: None
    on_trial: Callable[[str, int], None] = lambda name, left: None
    """Called before each trial with its name and how many are left at most."""
    kept: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def climb(self) -> Climbed:
        baseline = self._baseline()
        self._take_batch_size(baseline)
        for place, name in enumerate(self.rungs):
            self._try_rung(name, all_rungs()[name], baseline, left=len(self.rungs) - place)
        changed = {k: v for k, v in self.kept.items() if self._base().get(k) != v or k not in self._base()}
        ends = self._compare("ends", base=self._base(), new=self._now(), left=0) if changed else None
        validation = self._validate()
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
        """Run the original options once: everything else is measured against trainings that work."""
        self.on_trial("baseline", len(TURNS) * (len(self.rungs) + 1) + 2)
        trial = self.trials.run("baseline", self._base())
        if not trial.finished:
            raise UserError(
                "The training does not run with the original options.",
                why=trial.error,
                do=f"make it run with `crosstune train` first; its output is {self.trials.folder / 'baseline.log'}",
            )
        return trial

    def _take_batch_size(self, baseline: Trial) -> None:
        """Ask for the size that the baseline found for `--batch_size auto`: rungs multiply and divide it."""
        found = mapping(self._recorded(baseline).get("options")).get("batch_size")
        if "batch_size" in self.asked and make_config(**self._base()).batch_size == AUTO:
            self.asked = {**self.asked, "batch_size": found}

    def _try_rung(self, name: str, rung: Rung, baseline: Trial, *, left: int) -> None:
        try:
            changes = rung.propose(self._situation(baseline))
            if not changes:
                raise NotApplicable("it has nothing to change")
        except NotApplicable as reason:
            self._note(
                Step(
                    rung=name,
                    title=rung.title,
                    outcome="does not apply",
                    why=str(reason),
                    promise=rung.promise.text,
                )
            )
            return
        for number_, change in enumerate(changes, start=1):
            verdict, comparison = self._try_change(f"{name}-{number_}", rung, change, left=left)
            self._note(
                Step(
                    rung=name,
                    title=rung.title,
                    outcome="kept" if verdict.kept else "rolled back",
                    why=verdict.why,
                    promise=rung.promise.text,
                    change=change,
                    comparison=comparison,
                )
            )
            if not verdict.kept:
                break
            self.kept.update(change)

    def _try_change(
        self, name: str, rung: Rung, change: Change, *, left: int
    ) -> tuple[Verdict, Comparison | None]:
        new = {**self._now(), **change}
        try:
            _plan(new)
        except UserError as error:
            return Verdict(kept=False, why=f"refused: {error.asked} {error.why}".strip()), None
        comparison = self._compare(name, base=self._now(), new=new, left=left)
        return judge(comparison, promise=rung.promise, gain=rung.gain, goal=self.goal), comparison

    def _compare(
        self, name: str, *, base: Mapping[str, Any], new: Mapping[str, Any], left: int
    ) -> Comparison:
        most = len(TURNS) * (left + 1) + 1
        return compare(
            self.trials, name, base=base, new=new, on_trial=lambda trial: self.on_trial(trial, most)
        )

    def _validate(self) -> Trial:
        """Train with the final options once more and save checkpoints on the way."""
        self.on_trial("validation", 1)
        every = max(1, self.trials.steps // 3)
        return self.trials.run("validation", self._now(), save_steps=every, keep_last_n=3)

    def _situation(self, baseline: Trial) -> Situation:
        options = self._now()
        recorded = self._recorded(baseline)
        data = mapping(mapping(recorded.get("data")).get("train"))
        examples, tokens = number(data.get("examples")) or 0.0, number(data.get("tokens")) or 0.0
        plan = _plan(options)
        return Situation(
            config=plan.config,
            plan=plan,
            mean_tokens=tokens / examples if examples else 0.0,
            longest_tokens=int(number(data.get("longest")) or 0),
        )

    def _recorded(self, baseline: Trial) -> Mapping[str, Any]:
        return read_object(self.trials.folder / baseline.name / "plan.json")

    def _note(self, step: Step) -> None:
        self.steps.append(step)
        self.on_step(step)


def _plan(options: Mapping[str, Any]) -> Plan:
    config = make_config(**options)
    return resolve(config, gather(config))
