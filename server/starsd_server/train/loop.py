"""The training run: batches in, a better head out; stops and resumes without a trace.

A run is a function of (corpus, settings, seed): batch order, initial weights and updates have no other source
of chance, and a checkpoint holds all that later steps depend on, so a run that was interrupted ends with the
same bits as one that was not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_server.heads.head import EagleHead
from starsd_server.train.data import Batch, Corpus, batches
from starsd_server.train.unroll import UnrollLoss, unroll_loss

__all__ = ["Progress", "Settings", "Trainer"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a head is trained.

    The step sizes are for batches of about 2,000 rows. For the embedded head, matrices at 2e-3 kept the loss
    of the running weights 0.4 nats above that of the averaged ones (0.17 at 1e-3), and 5e-3 did not converge.

    rows        rows of a batch, padding included
    steps       updates of the whole run
    unroll      steps that the head is unrolled for
    decay       weight of each unrolled step against the one before
    regression  weight of the smooth L1 distance to the target's features
    matrix_lr   step size of matrices (Muon, scaled to the RMS of an Adam update)
    vector_lr   step size of norms and biases (AdamW)
    warmup      updates until the step size is reached
    cooldown    updates at the end over which it falls to zero; a run may be lengthened until it starts
    average     decay of the running mean of weights that is the result; 0 takes the last weights
    """

    rows: int = 2048
    steps: int = 3000
    unroll: int = 3
    decay: float = 0.9
    regression: float = 0.1
    matrix_lr: float = 1e-3
    vector_lr: float = 5e-4
    weight_decay: float = 0.01
    warmup: int = 50
    cooldown: int = 750
    average: float = 0.99
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16

    def rate(self, step: int) -> float:
        """Share of the step size at update `step`: up, flat, down by a square root (arXiv 2405.18392)."""
        left = self.steps - step
        down = 1.0 - math.sqrt(1.0 - left / self.cooldown) if left < self.cooldown else 1.0
        return min(1.0, (step + 1) / self.warmup) * down


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. agreement: per unrolled step, how often the head's first choice is the target's, on this
    batch; cross_entropy likewise in nats."""

    step: int
    epoch: int
    rows_per_s: float
    cross_entropy: list[float]
    agreement: list[float]


class Trainer:
    """Owns head, optimisers and the place in the data."""

    def __init__(
        self, head: EagleHead, corpus: Corpus, sequences: NDArray[np.int64], settings: Settings
    ) -> None:
        self.head, self.corpus, self.sequences, self.settings = head, corpus, sequences, settings
        self.step = self.epoch = self.batch = 0
        learned = [p for p in head.parameters() if p.requires_grad]
        matrices = [p for p in learned if p.ndim == 2]
        vectors = [p for p in learned if p.ndim != 2]
        s = settings
        self._optimisers = [
            torch.optim.Muon(
                matrices, lr=s.matrix_lr, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=s.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._rates = [s.matrix_lr, s.vector_lr]
        self._learned = learned
        self._mean = [p.detach().clone() for p in learned]

    def run(self, until_step: int, report: Callable[[Progress], None], report_every: int = 20) -> None:
        """Train up to update `until_step` (or the end of the run)."""
        began, rows = time.monotonic(), 0
        stream = self._stream()
        while self.step < min(until_step, self.settings.steps):
            batch = next(stream).to(self.head.embedding.device)
            reporting = (self.step + 1) % report_every == 0
            loss = self._update(batch, reporting)
            rows += batch.tokens.numel()
            if reporting:
                now = time.monotonic()
                report(
                    Progress(self.step, self.epoch, rows / (now - began), loss.cross_entropy, loss.agreement)
                )
                began, rows = now, 0

    def _update(self, batch: Batch, reporting: bool) -> UnrollLoss:
        s = self.settings
        loss = unroll_loss(self.head, batch, s.unroll, s.decay, s.regression, s.dtype, reporting)
        loss.total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self._learned, 1.0)
        for optimiser, rate in zip(self._optimisers, self._rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * s.rate(self.step)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        # The mean forgets the start of the run faster than its own decay would.
        keep = min(s.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, p in zip(self._mean, self._learned, strict=True):
                mean.lerp_(p, 1 - keep)
        return loss

    def _stream(self) -> Iterator[Batch]:
        while True:
            s = self.settings
            for batch in batches(self.corpus, self.sequences, s.rows, s.seed, self.epoch, self.batch):
                self.batch += 1
                yield batch
            self.epoch, self.batch = self.epoch + 1, 0

    def averaged(self) -> dict[str, Tensor]:
        """The result so far: the head's learned tensors by name, averaged over the last updates."""
        names = [name for name, p in self.head.named_parameters() if p.requires_grad]
        return {name: mean.clone() for name, mean in zip(names, self._mean, strict=True)}

    def save(self, path: Path) -> None:
        """Write everything later updates depend on; a reader sees the old file or the new one."""
        state = {
            "place": {"step": self.step, "epoch": self.epoch, "batch": self.batch},
            "weights": [p.detach() for p in self._learned],
            "mean": self._mean,
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.head.embedding.device)
        place = state["place"]
        self.step, self.epoch, self.batch = place["step"], place["epoch"], place["batch"]
        with torch.no_grad():
            for own, saved in zip(self._learned + self._mean, state["weights"] + state["mean"], strict=True):
                own.copy_(saved)
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
