"""The jobs of the app: generate in full and accelerated, predict, calibrate, open a policy.

One pipeline is kept, one policy per model, and one job runs at a time: others wait for it. What a
speed-up costs is predicted from the profile, without the network. Policies that are made stay in
the working folder, and are used again by the next session. Knows nothing of Gradio.
"""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ertacache.app.outcomes import Cancelled, Opened, Outcome, Prediction, Report
from ertacache.app.requests import (
    Limits,
    Request,
    check_prompts,
    check_upload,
    find_models,
    find_policies,
    free_name,
)
from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.session import Session
from ertacache.core.gram import Schedule
from ertacache.core.plans import Target
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import check_pipeline, find_denoisers
from ertacache.integration.schedulers import read_schedule
from ertacache.integration.sizes import check_size
from ertacache.integration.solve import PlanSolver
from ertacache.metrics import NotAvailableError, lpips, psnr, ssim
from ertacache.models.zoo import MODELS, call_defaults, load_pipeline, load_prompts

__all__ = ["Engine"]

KEPT_CURVES = 16  # settings whose predictions are kept
SECONDS_APART = 0.5  # between two reports of a run
NO_POLICY = "there is no policy for {} yet: calibrate it first, or open a policy file"
PROMPTS = (  # for models that are not bundled
    "a portrait of an old fisherman, natural light",
    "a mountain lake at sunrise with mist",
    "a bowl of oranges on a wooden table",
    "a red bicycle in front of a white wall",
    "a street in Tokyo at night in the rain",
    "a cat that sleeps on a blue sofa",
    "a watercolour of a lighthouse in a storm",
    "a macro photograph of a bee on a flower",
)
BUSY = "a job is running; move the slider again when it is done"


class _Stopped(Exception):  # noqa: N818
    """Ends a call of a pipeline before its network is evaluated."""


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
            folder: the working folder: pipelines in it can be chosen, policies in it are used, and
                those that are made are written there. None keeps everything in memory.
            limits: what a job may take.
        """
        self.limits = limits or Limits()
        self.models: dict[str, str] = {name: name for name in MODELS}
        if folder is not None:
            self.models |= {
                name: str(path) for name, path in find_models(folder).items() if name not in MODELS
            }
        self._folder = folder
        self._loaded: _Loaded | None = None
        self._policies: dict[str, Policy] = {}
        self._searched: set[str] = set()  # models whose policy was looked for in the folder
        self._curves: dict[tuple[object, ...], tuple[Schedule, dict[int, float]]] = {}
        self._job, self._cancel = threading.Lock(), threading.Event()
        self._owner: object = None  # who started the job that is running

    def policy(self, model: str) -> Policy | None:
        """The policy of a model, None if there is none yet."""
        return self._policies.get(self._name(model))

    def default_request(self, model: str) -> Request:
        """The settings that a model was trained for, and its first held-out prompt.

        Of a folder the defaults of its pipeline, within the limits.
        """
        if self._name(model) not in MODELS:
            known, side = call_defaults(self.models[model]), self.limits.side
            height, width = (min(known.get(name) or 512, side) for name in ("height", "width"))
            steps, frames = known.get("num_inference_steps", 30), known.get("num_frames")
            return Request("a cat", 0, steps, height, width, frames=frames)
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
        asked, name = request.check(self.limits), self._name(model)
        budget = Target(speedup=asked.speedup).budget(asked.steps)
        assert budget is not None
        plain = Prediction(budget, asked.steps)
        with self._unless_busy() as free:
            if free:
                self._search_policy(name)
            policy = self.policy(name)
            if policy is None:
                return replace(plain, why=NO_POLICY.format(name) if free else BUSY, ready=not free)
            if policy.profile is None:
                return replace(plain, why="the policy has no profile to predict from")
            known = self._curve(name, policy, asked, free=free)
        if known is None:
            return replace(plain, why=BUSY)
        schedule, curve = known
        budget = max(budget, min(curve))
        if budget >= asked.steps:
            return Prediction(asked.steps, asked.steps, float("inf"))
        fitted = (p for p in policy.plans if p.fits(schedule) and len(p.compute_steps) == budget)
        measured = next((plan.measured for plan in fitted), None)
        psnr = PlanSolver(policy).psnr(curve[budget])
        return Prediction(budget, asked.steps, psnr, measured=measured)

    def generate(
        self, model: str, request: Request, report: Report | None = None, *, owner: object = None
    ) -> Outcome:
        """Generate a request in full and under the policy of the model, and compare the two.

        Args:
            model: one of ``models``.
            request: what to generate.
            report: receives the progress.
            owner: who may cancel it.

        Raises:
            ValueError: the request is out of range, or there is no policy for the model.
        """
        asked, announce = request.check(self.limits), report or _silent
        budget = Target(speedup=asked.speedup).budget(asked.steps)
        run = [ProfiledPrompt(asked.prompt.strip(), asked.seed)]
        with self._running(owner) as notes:
            self._search_policy(self._name(model))
            policy = self.policy(model)
            if policy is None:
                raise ValueError(NO_POLICY.format(model))
            announce("load", 0, 0)
            session = self._session(model, asked)
            with self._stage("full run", session, announce):
                full = session.generate(run)
            with self._stage("accelerated run", session, announce):
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
        report: Report | None = None,
        *,
        quick: bool = False,
        owner: object = None,
    ) -> Opened:
        """Make a policy for a model; it is used from now on, and written to the working folder.

        Args:
            model: one of ``models``.
            prompts: one per line; a quarter of them is held out, unless it is quick.
            request: gives steps and size.
            report: receives the progress.
            quick: profile only: nothing is tried, refitted or measured on held-out prompts.
            owner: who may cancel it.

        Raises:
            Cancelled: ``cancel`` was called; the policy of before is still used.
        """
        texts, asked = check_prompts(prompts, self.limits), request.check(self.limits)
        announce = report or _silent

        def stage(name: str) -> Callable[[int, int], None]:
            announce(name, 0, 0)
            return lambda done, total: announce(name, done, total)

        with self._running(owner) as notes:
            announce("load", 0, 0)
            session = self._session(self._name(model), asked)
            with self._each_step(session.pipe, self._check_cancelled):
                policy = calibrate(
                    session.pipe,
                    texts,
                    heldout=[] if quick else None,
                    refit=not quick,
                    stage=stage,
                    provenance={"model": model},
                    **session.call,
                )
            self._use(model, policy)
            file = self._keep(model, policy, notes)
        return Opened(policy, tuple(notes), file)

    def cancel(self, owner: object = None) -> bool:
        """End the job of an owner before its next network evaluation; False if none is running."""
        if not self._job.locked() or self._owner != owner:
            return False
        self._cancel.set()
        return True

    def close(self) -> None:
        """End the job that is running, whoever started it."""
        self._cancel.set()

    def calibration_prompts(self, model: str, count: int) -> str:
        """Prompts to calibrate a model with, one per line: its own, or general ones."""
        known: Sequence[str] = PROMPTS
        if self._name(model) in MODELS:
            known = load_prompts(model, "calibration")
        return "\n".join(known[:count])

    def _name(self, model: str) -> str:
        if model not in self.models:
            raise ValueError(f"{str(model)[:80]!r} is none of: {', '.join(self.models)}")
        return model

    def _use(self, model: str, policy: Policy) -> None:
        self._policies[model] = policy
        self._curves = {key: curve for key, curve in self._curves.items() if key[0] != model}

    def _keep(self, model: str, policy: Policy, notes: list[str]) -> str | None:
        """Write a policy into the working folder, beside those of before; returns its name."""
        if self._folder is None:
            return None
        path = free_name(self._folder / f"{model}.safetensors")
        try:
            policy.save(path)
        except OSError as cause:
            notes.append(f"the policy is not in the working folder: {cause.strerror or cause}")
            return None
        return path.name

    def _search_policy(self, model: str) -> None:
        """Use the newest policy of the working folder that was made for a model."""
        if self._folder is None or model in self._policies or model in self._searched:
            return
        self._searched.add(model)
        for path in find_policies(self._folder, self.limits):
            try:
                policy = Policy.load(path)
                if Path(policy.provenance.get("model", model)).name != model:
                    continue  # the same architecture may have other weights
                if "lora" in policy.provenance:
                    continue  # the model has none here
                check_pipeline(self._open(model).pipe, policy)
            except (ValueError, TypeError, OSError):  # another kind of file, or another network
                continue
            self._use(model, policy)
            return

    def _session(self, model: str, asked: Request) -> Session:
        """The pipeline of a model, called as requested; raise if a result does not fit."""
        session = self._open(model).session(asked)
        check_size(session.pipe, session.call)
        return session

    @contextmanager
    def _stage(self, name: str, session: Session, announce: Report) -> Iterator[None]:
        """One run, which reports its steps now and then, and can be cancelled at each."""
        scheduler, steps, last = session.pipe.scheduler, session.call["num_inference_steps"], 0.0
        announce(name, 0, steps)

        def before() -> None:
            nonlocal last
            self._check_cancelled()
            if time.monotonic() - last >= SECONDS_APART:
                announce(name, getattr(scheduler, "step_index", None) or 0, steps)
                last = time.monotonic()

        with self._each_step(session.pipe, before):
            yield

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
    def _running(self, owner: object = None) -> Iterator[list[str]]:
        """One job; yields the list that its warnings are added to when it ends."""
        notes: list[str] = []
        with self._job, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self._cancel.clear()
            self._owner = owner
            try:
                yield notes
            finally:
                self._owner = None
                found = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
                notes += dict.fromkeys(found)

    @contextmanager
    def _unless_busy(self) -> Iterator[bool]:
        """Hold off jobs for a moment; False if one is running."""
        free = self._job.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._job.release()

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

    def _curve(
        self, model: str, policy: Policy, asked: Request, *, free: bool
    ) -> tuple[Schedule, dict[int, float]] | None:
        """Schedule of a request, and its predicted error by the number of computed steps.

        None if a job is in the way.
        """
        key = model, asked.steps, asked.height, asked.width, asked.frames
        if key not in self._curves:
            if not free:
                return None
            schedule = self._schedule(model, asked)
            while len(self._curves) >= KEPT_CURVES:
                self._curves.pop(next(iter(self._curves)))
            self._curves[key] = schedule, PlanSolver(policy).curve(schedule)
        return self._curves[key]

    def _schedule(self, model: str, asked: Request) -> Schedule:
        """The schedule that the pipeline sets for a request, which is left at its first step."""
        session = self._session(model, asked)

        def stop() -> None:
            raise _Stopped

        with self._each_step(session.pipe, stop):
            try:
                session.run([ProfiledPrompt(asked.prompt, asked.seed)])
            except _Stopped:
                return read_schedule(session.pipe.scheduler)
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
