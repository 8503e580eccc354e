"""The jobs of the app: generate in full and accelerated, predict, calibrate, open a policy.

One pipeline is kept, one policy per model, and one job runs at a time: others wait for it. What a
speed-up costs is predicted from the profile, without the network. Knows nothing of Gradio.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ertacache.app.requests import Limits, Request, check_prompts, check_upload, find_models
from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.session import Session
from ertacache.core.gram import Schedule
from ertacache.core.plans import Target
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import check_pipeline, find_denoisers
from ertacache.integration.schedulers import read_schedule
from ertacache.integration.solve import PlanSolver
from ertacache.metrics import NotAvailableError, lpips, psnr, ssim
from ertacache.models.zoo import MODELS, load_pipeline, load_prompts

__all__ = ["Cancelled", "Engine", "Opened", "Outcome", "Prediction", "Report"]

Report = Callable[[str, int, int], None]
"""Receives a stage, the work done in it, and the total; a total of 0 is unknown."""

KEPT_CURVES = 16  # settings whose predictions are kept
NO_POLICY = "there is no policy for {}: calibrate it, or open a policy file"


class Cancelled(Exception):  # noqa: N818  not an error: it was asked for
    """Raised in a job that was cancelled."""


class _Stopped(Exception):  # noqa: N818
    """Ends a call of a pipeline before its network is evaluated."""


@dataclass(frozen=True)
class Prediction:
    """What is known of a run before it starts.

    Attributes:
        computed: network evaluations under the policy, per guidance branch.
        num_steps: those of the full run.
        psnr: predicted PSNR to the full run in dB; None if it cannot be predicted.
        why: why it cannot.
    """

    computed: int
    num_steps: int
    psnr: float | None = None
    why: str = ""


@dataclass(frozen=True, eq=False)
class Opened:
    """A policy that was made or opened, and the warnings that came with it."""

    policy: Policy
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """One request, generated twice.

    Attributes:
        full: result of the full run, (3, height, width) or (frames, 3, height, width), 0 to 1.
        accelerated: result under the policy, of the same shape.
        full_seconds: of the full run.
        seconds: of the accelerated run.
        compute_steps: the steps that were computed.
        num_steps: steps of the run.
        scores: PSNR, SSIM and LPIPS by name; a string says why one is not available.
        notes: warnings of the runs.
    """

    full: Tensor
    accelerated: Tensor
    full_seconds: float
    seconds: float
    compute_steps: tuple[int, ...]
    num_steps: int
    scores: dict[str, float | str]
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class _Loaded:
    """The pipeline that is kept, and the arguments of its call."""

    name: str
    pipe: Any
    defaults: dict[str, Any]

    def session(self, request: Request) -> Session:
        """The pipeline, called as requested."""
        changes = {
            "num_inference_steps": request.steps,
            "height": request.height,
            "width": request.width,
        }
        if self.is_video and request.frames is not None:
            changes["num_frames"] = request.frames
        return Session(self.pipe, self.defaults | changes)

    @property
    def is_video(self) -> bool:
        return "num_frames" in inspect.signature(self.pipe.__call__).parameters


class Engine:
    """Runs the jobs of the app, one at a time.

    Attributes:
        limits: what a job may take.
        models: what may be chosen: the bundled models and the pipelines in the working folder.
    """

    def __init__(self, folder: Path | None = None, *, limits: Limits | None = None) -> None:
        """Begin without a model.

        Args:
            folder: the working folder; pipelines in it can be chosen. None offers bundled ones.
            limits: what a job may take.
        """
        self.limits = limits or Limits()
        self.models: dict[str, str] = {name: name for name in MODELS}
        if folder is not None:
            self.models |= {
                name: str(path) for name, path in find_models(folder).items() if name not in MODELS
            }
        self._loaded: _Loaded | None = None
        self._policies: dict[str, Policy] = {}
        self._curves: dict[tuple[object, ...], dict[int, float]] = {}
        self._job, self._cancel = threading.Lock(), threading.Event()

    def policy(self, model: str) -> Policy | None:
        """The policy of a model, None if there is none yet."""
        return self._policies.get(self._name(model))

    def default_request(self, model: str) -> Request:
        """The settings that a model was trained for, and its first held-out prompt."""
        if self._name(model) not in MODELS:
            return Request("a cat", 0, 30, 512, 512)
        row = MODELS[model]
        prompt = load_prompts(model, "heldout")[0]
        return Request(prompt, 0, row.num_inference_steps, *row.size, frames=row.num_frames)

    def open_policy(self, path: Path, *, model: str | None = None) -> Opened:
        """Read a policy file that was uploaded; with a model, use it from now on.

        Raises:
            ValueError: it is too large, damaged, or of another network.
        """
        policy, notes = Policy.load(check_upload(path, self.limits)), list[str]()
        if model is not None:
            with self._running() as notes:
                check_pipeline(self._open(model).pipe, policy)
            self._use(model, policy)
        return Opened(policy, tuple(notes))

    def predict(self, model: str, request: Request) -> Prediction:
        """Network evaluations and PSNR of a request, without evaluating the network.

        The sigma schedule of new settings is read off the pipeline, which a running job delays; the
        prediction then comes without a PSNR.
        """
        asked = request.check(self.limits)
        budget = Target(speedup=asked.speedup).budget(asked.steps)
        assert budget is not None
        plain = Prediction(budget, asked.steps)
        policy = self.policy(model)
        if policy is None:
            return replace(plain, why=NO_POLICY.format(model))
        if policy.profile is None:
            return replace(plain, why="the policy has no profile to predict from")
        curve = self._curve(model, policy, asked)
        if curve is None:
            return replace(plain, why="a job is running; move the slider again when it is done")
        budget = max(budget, min(curve))
        if budget >= asked.steps:
            return Prediction(asked.steps, asked.steps, float("inf"))
        return Prediction(budget, asked.steps, PlanSolver(policy).psnr(curve[budget]))

    def generate(self, model: str, request: Request, report: Report | None = None) -> Outcome:
        """Generate a request in full and under the policy of the model, and compare the two.

        Raises:
            ValueError: the request is out of range, or there is no policy for the model.
        """
        asked, tell = request.check(self.limits), report or _silent
        policy = self.policy(model)
        if policy is None:
            raise ValueError(NO_POLICY.format(model))
        budget = Target(speedup=asked.speedup).budget(asked.steps)
        run = [ProfiledPrompt(asked.prompt.strip(), asked.seed)]
        with self._running() as notes:
            tell("load", 0, 0)
            session = self._open(model).session(asked)
            with self._each_step(session.pipe, self._check_cancelled):
                tell("full run", 0, 2)
                full = session.generate(run)
                tell("accelerated run", 1, 2)
                fast = session.generate(run, policy, target=Target(compute_steps=budget))
        plan = fast.plan
        steps = tuple(range(asked.steps)) if plan is None else tuple(plan.compute_steps)
        return Outcome(
            full.results[0],
            fast.results[0],
            full.seconds,
            fast.seconds,
            steps,
            asked.steps,
            _scores(fast.results, full.results),
            tuple(notes),
        )

    def calibrate(
        self,
        model: str,
        prompts: str,
        request: Request,
        speedups: Sequence[float] = (2.0, 3.0),
        report: Report | None = None,
    ) -> Opened:
        """Make a policy for a model; it is used from now on.

        Args:
            model: one of ``models``.
            prompts: one per line; a quarter of them is held out.
            request: gives steps and size.
            speedups: those to refit and validate.
            report: receives the progress.

        Raises:
            Cancelled: ``cancel`` was called; the policy of before is still used.
        """
        texts, asked = check_prompts(prompts, self.limits), request.check(self.limits)
        tell = report or _silent

        def stage(name: str) -> Callable[[int, int], None]:
            tell(name, 0, 0)
            return lambda done, total: tell(name, done, total)

        with self._running() as notes:
            loaded = self._open(model)
            call = loaded.session(asked).call
            with self._each_step(loaded.pipe, self._check_cancelled):
                policy = calibrate(
                    loaded.pipe,
                    texts,
                    speedup=list(speedups),
                    stage=stage,
                    provenance={"model": model},
                    **call,
                )
        self._use(model, policy)
        return Opened(policy, tuple(notes))

    def cancel(self) -> None:
        """End the job that is running before its next network evaluation."""
        self._cancel.set()

    def calibration_prompts(self, model: str, count: int) -> str:
        """Prompts to calibrate a bundled model with, one per line; none for another."""
        known = load_prompts(model, "calibration") if self._name(model) in MODELS else []
        return "\n".join(known[:count])

    def _name(self, model: str) -> str:
        if model not in self.models:
            raise ValueError(f"{str(model)[:80]!r} is none of: {', '.join(self.models)}")
        return model

    def _use(self, model: str, policy: Policy) -> None:
        self._policies[model] = policy
        self._curves = {key: curve for key, curve in self._curves.items() if key[0] != model}

    def _open(self, model: str) -> _Loaded:
        """The pipeline of a model; the one of before is let go first, to have its memory."""
        if self._loaded is None or self._loaded.name != self._name(model):
            self._loaded = None
            defaults = MODELS[model].call_arguments if model in MODELS else {}
            try:
                pipe = load_pipeline(self.models[model])
            except Exception as cause:  # a folder can be broken in any way
                raise ValueError(f"cannot load the pipeline {model!r}: {cause}") from cause
            place = "cuda" if torch.cuda.is_available() else "cpu"
            self._loaded = _Loaded(model, pipe.to(place), defaults)
        return self._loaded

    @contextmanager
    def _running(self) -> Iterator[list[str]]:
        """One job; yields the list that its warnings are added to when it ends."""
        notes: list[str] = []
        with self._job, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self._cancel.clear()
            try:
                yield notes
            finally:
                found = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
                notes += dict.fromkeys(found)

    @contextmanager
    def _each_step(self, pipe: Any, before: Callable[[], None]) -> Iterator[None]:
        """Call something before every evaluation of the networks of a pipeline."""
        networks = find_denoisers(pipe).values()
        hooks = [
            each.register_forward_pre_hook(lambda *_: before(), prepend=True) for each in networks
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check_cancelled(self) -> None:
        if self._cancel.is_set():
            raise Cancelled("cancelled: nothing was changed")

    def _curve(self, model: str, policy: Policy, asked: Request) -> dict[int, float] | None:
        """Predicted error by the number of computed steps; None if a job is in the way."""
        key = model, asked.steps, asked.height, asked.width, asked.frames
        if key not in self._curves:
            if not self._job.acquire(blocking=False):
                return None
            try:
                schedule = self._schedule(model, asked)
            finally:
                self._job.release()
            while len(self._curves) >= KEPT_CURVES:
                self._curves.pop(next(iter(self._curves)))
            self._curves[key] = PlanSolver(policy).curve(schedule)
        return self._curves[key]

    def _schedule(self, model: str, asked: Request) -> Schedule:
        """The schedule that the pipeline sets for a request, which is left at its first step."""
        loaded = self._open(model)

        def stop() -> None:
            raise _Stopped

        with self._each_step(loaded.pipe, stop):
            try:
                loaded.session(asked).run([ProfiledPrompt(asked.prompt, asked.seed)])
            except _Stopped:
                return read_schedule(loaded.pipe.scheduler)
        raise PolicyError("the pipeline evaluated no network")


def _silent(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


def _scores(result: Tensor, reference: Tensor) -> dict[str, float | str]:
    """PSNR, SSIM and LPIPS; where one is not available, the reason."""
    found: dict[str, float | str] = {}
    for name, metric in (("PSNR", psnr), ("SSIM", ssim), ("LPIPS", lpips)):
        try:
            found[name] = float(metric(result, reference)[0])
        except (NotAvailableError, ValueError) as cause:
            found[name] = str(cause)
    return found
