"""`fit`: public training in one call, standard or such that the weights withstand noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tacit.data import TensorRecords
from tacit.pretrain import _saving as saving
from tacit.pretrain._plan import Method, Options, Perturbation, Training
from tacit.pretrain._robust import Robust
from tacit.pretrain._rows import as_table, checked
from tacit.progress import shown
from tacit.recipes import Progress


def fit(
    model: nn.Module,
    data: Any,
    *,
    public: bool = False,
    method: Method = "standard",
    radius: float = 2.0,
    perturb_batch: int = 5000,
    perturb_lr: float = 1.0,
    adaptive: bool = False,
    per_tensor: bool = False,
    reuse: int = 1,
    microbatch: int = 500,
    warmup: float = 0.0,
    checkpoint: str | Path | None = None,
    every: int = 500,
    progress: Progress | bool = False,
    **training: Unpack[Options],
) -> nn.Module:
    """Train `model` in place on data that the caller declares public, and return it in evaluation mode.

    Running statistics (BatchNorm) follow only what is computed at unperturbed weights: in perturbed steps, the batch
    that perturbs. Nothing here is private.

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items; labels are classes.
        public: Must be True: the caller declares the data public.
        method: "standard"; "sam" and "amp", which perturb the weights on the batch of the step; "dpadapter", which
            perturbs them on a batch of its own.
        radius: See `Perturbation`; 0 is standard training.
        perturb_batch: See `Perturbation`.
        perturb_lr: See `Perturbation`.
        adaptive: See `Perturbation`.
        per_tensor: See `Perturbation`.
        reuse: See `Perturbation`.
        microbatch: See `Perturbation`.
        warmup: See `Perturbation`.
        checkpoint: A file, written every `every` steps and at the end. Repeat the same call after a crash to resume; it
            ends at the very weights that it would have had.
        every: Steps between checkpoints.
        progress: True shows a bar; a function gets the same facts.
        **training: Arguments of `Training`: epochs or steps, batch_size, rule, lr, momentum, weight_decay, decay, clip,
            augment, seed.

    Returns:
        The model.

    Raises:
        ValueError: The data are not declared public, or an invalid option.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from tacit import pretrain
        >>> data = torch.randn(40, 4), torch.arange(40) % 2
        >>> model = pretrain.fit(nn.Linear(4, 2), data, public=True, method="sam", radius=0.1, steps=5, batch_size=10)
        >>> model.training
        False
    """
    if not public:
        raise ValueError("Pretraining is not private: give public=True if this data is public, or use finetune.")
    how = Perturbation(
        method=method,
        radius=radius,
        perturb_batch=perturb_batch,
        perturb_lr=perturb_lr,
        adaptive=adaptive,
        per_tensor=per_tensor,
        reuse=reuse,
        microbatch=microbatch,
        warmup=warmup,
    )
    plan = Training(**training)
    if every < 1:
        raise ValueError(f"every is a number of steps, at least 1; got {every}.")
    rows = checked(as_table(data), model)
    if len(rows) < plan.batch_size:
        raise ValueError(f"{len(rows)} rows do not fill one batch of {plan.batch_size}.")
    if method == "dpadapter" and len(rows) < perturb_batch:
        raise ValueError(f"perturb_batch is {perturb_batch}, and there are only {len(rows)} rows to draw it from.")
    run = _Run(model, rows, plan, how)
    if checkpoint is not None:
        run.keep(Path(checkpoint))
    devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with shown(progress) as report, torch.random.fork_rng(devices=devices):
        model.train()
        for step in range(run.done, run.steps):
            loss = run.step(step)
            if checkpoint is not None and ((step + 1) % every == 0 or step + 1 == run.steps):
                run.save(step + 1)
            if report is not None:
                run.report(report, step + 1, loss)
    return model.eval()


class _Run:
    """One run: its rows, its random numbers, its optimizer.

    The random numbers of perturbations are their own, so that a radius of 0 leaves everything else as it is; those of
    the model itself (dropout) start anew in every step, from the seed and the step.
    """

    def __init__(self, model: nn.Module, rows: TensorRecords, plan: Training, how: Perturbation) -> None:
        self.model, self.rows, self.plan, self.how = model, rows, plan, how
        self.steps = plan.total(len(rows))
        self.done = 0
        self.robust = Robust(
            _optimizer(model, plan),
            method=how.method,
            radius=how.radius,
            perturb_lr=how.perturb_lr,
            adaptive=how.adaptive,
            per_tensor=how.per_tensor,
            reuse=how.reuse,
            model=model,
        )
        self._device = next(model.parameters()).device
        self._draws = Generator().manual_seed(plan.seed)
        self._others = Generator().manual_seed(plan.seed + 2**32)  # of the perturbing batches
        self._order = torch.empty(0, dtype=torch.long)
        self._path: Path | None = None
        self._name = ""
        self._what = ""

    def keep(self, path: Path) -> None:
        """Write checkpoints to a file, and go on from the one that is there."""
        names = [(name, tuple(value.shape)) for name, value in self.model.state_dict().items()]
        self._name = repr((self.plan, self.how, names, self.rows.fingerprint()))
        self._path = path
        if path.exists():
            self.done, self._order = saving.load(
                path, run=self._name, model=self.model, robust=self.robust, generators=[self._draws, self._others]
            )

    def save(self, step: int) -> None:
        if self._path is not None:
            saving.save(
                self._path,
                run=self._name,
                step=step,
                model=self.model,
                robust=self.robust,
                order=self._order,
                generators=[self._draws, self._others],
            )

    def step(self, step: int) -> float:
        """One update; returns the loss of its batch, at the weights where its gradient was taken."""
        self._pace(step)
        batch = self._batch(step)
        self.robust.zero_grad()
        if step >= self.how.first(self.steps):
            if self.robust.due:
                torch.manual_seed(self._fate(step, 1))
                self._perturbing_gradient(batch)
            self.robust.perturb()
        torch.manual_seed(self._fate(step, 0))
        try:
            loss = functional.cross_entropy(self.model(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self.robust.revert()
            raise
        if self.plan.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.robust.step()
        found = float(loss.detach())
        if not found < float("inf"):
            raise ValueError(f"The loss is {found} at step {step + 1}: lower lr or radius.")
        return found

    def report(self, progress: Progress, step: int, loss: float) -> None:
        if not self._what or step % max(1, self.steps // 20) == 0:
            self._what = f"pretraining, {self.how.method}: loss {loss:.3f}"
        progress(self._what, step, self.steps)

    def _pace(self, step: int) -> None:
        lr, momentum = self.plan.pace(step, self.steps)
        for group in self.robust.optimizer.param_groups:
            group["lr"] = lr
            if self.plan.rule == "adamw":
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The next rows of a shuffled pass."""
        place = step % (len(self.rows) // self.plan.batch_size)
        if place == 0:
            self._order = torch.randperm(len(self.rows), generator=self._draws)
        return self._read(self._order[place * self.plan.batch_size :][: self.plan.batch_size], self._draws)

    def _perturbing_gradient(self, batch: tuple[Tensor, Tensor]) -> None:
        """The gradient of the mean loss over the rows that perturb, at the weights as they are."""
        if self.how.own_batch:
            functional.cross_entropy(self.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            return
        count = self.how.perturb_batch
        drawn = torch.randperm(len(self.rows), generator=self._others)[:count]
        for part in torch.split(drawn, self.how.microbatch):
            inputs, labels = self._read(part, self._others)
            loss = functional.cross_entropy(self.model(inputs), labels, reduction="sum") / count
            loss.backward()  # type: ignore[no-untyped-call]

    def _read(self, index: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        rows = self.rows.rows(index, None)
        inputs = rows.inputs if self.plan.augment is None else self.plan.augment(rows.inputs, generator)
        return inputs.to(self._device), rows.labels.to(self._device)

    def _fate(self, step: int, which: int) -> int:
        return (self.plan.seed * 1_000_003 + 2 * step + which) % 2**63


def _optimizer(model: nn.Module, plan: Training) -> torch.optim.Optimizer:
    groups = _groups(model, plan.weight_decay)
    if plan.rule == "adamw":
        return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.momentum, 0.999))
    return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices and kernels only: scales and biases have nothing to shrink to. Frozen weights stay out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
