"""`make_private`: people's own training loops, made private."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader

from tacit._context import PrivacyContext, takes_context
from tacit._curator import Curator, as_curator
from tacit._refusals import Refusal, attempt
from tacit.distributed import shards_of, team
from tacit.finetune._account import Promise, assumptions, check_promise
from tacit.finetune._dry_run import LABELS, check_labels, rehearse_portion
from tacit.finetune._loader import LoaderRecords, batching, check_loader
from tacit.finetune._loop import Run
from tacit.finetune._loss_forms import check_classes, name_of, parted, per_row
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._own_loop import PrivateLoop, eager
from tacit.finetune._queries import ClippedGradient, GradientQuery
from tacit.finetune._ranks import account_for, check_ranks
from tacit.finetune._reading import blank, likeness, to, try_workers, where_of
from tacit.finetune._sampling import Poisson
from tacit.finetune._saving import Store
from tacit.finetune._sharded import ShardedRun, ShardedUpdater, without_values
from tacit.finetune._tasks import Task, outputs_of
from tacit.finetune._team_run import TeamRun
from tacit.finetune._torch_optimizer import (
    GradientGuard,
    TorchUpdater,
    check_optimizer,
    check_stateful,
    rehearse_optimizer,
)
from tacit.gradients import Policy, change, refuse_live_statistics
from tacit.models import uncompiled
from tacit.privacy import Budget, Ledger, Neighbours, Unit, mechanisms
from tacit.privacy.events import check_count


@takes_context
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss: Any,
    *,
    epsilon: float,
    delta: float,
    epochs: int | None = None,
    clip: float | Policy,
    unit_ids: Any = None,
    unit: Unit | str | None = None,
    size: int | None = None,
    neighbours: Neighbours | str | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    rows_each: int | None = None,
    microbatch: int | None = None,
    autocast: torch.dtype | None = None,
    ledger: Ledger | None = None,
    subject: str | None = None,
    checkpoint: str | Path | None = None,
    every: int = 100,
    private: str | Path | None = None,
    stateful: Mapping[str, Any] | None = None,
    seed: int | None = None,
    curator: Curator | None = None,
    context: PrivacyContext | None = None,
) -> PrivateLoop:
    """Make a training loop of your own private (DP-SGD): the whole run is charged here, once, before its first step.

    Iterate over the result (or over its `loader`, an epoch at a time) and call `step(batch)` in place of `zero_grad`,
    `backward` and `optimizer.step()`. Everything else in the loop stays: schedulers, averages of weights, evaluation.

    Formal guarantee: unit, a row of the loader's data set or all rows with the same id; neighbours as given. A step is
    one release of the sum over a Poisson subsample of whole units, drawn from the receipt's key, of their mean
    gradients, each clipped at `clip`, with Gaussian noise on a public grid; all of them are composed by PLD. The
    divisor is the public `batch_size`. A row that cannot be read, or whose loss or gradient is not finite, contributes
    zero. What the optimizer and the rest of the loop do with a released gradient is post-processing, as long as they
    do not look at private rows themselves. It is the loop of `finetune.fit`: the same key gives the same weights.

    Args:
        model: Any torch model; it is trained in place. A compiled one (`torch.compile`) is trained as the model that it
            was made from, whose parameters it shares. Layers with running statistics that are in evaluation mode now
            stay so in every step.
        optimizer: Any `torch.optim` optimizer of the model's trainable parameters, with or without a scheduler.
        loader: A `DataLoader`. Its data set, transforms, collate function and workers are kept; its order (shuffled or
            not) is replaced by Poisson subsampling. The collate function is called for one row at a time, so that rows
            have one shape: pad to a fixed length. Samplers of one's own are refused.
        loss: A criterion of outputs and targets (`nn.CrossEntropyLoss()`, `torch.nn.functional.cross_entropy`) for
            batches of (inputs, targets) or mappings with "labels", a task (`finetune.NextToken(…)`), or a function
            `loss(model, batch)` that returns one loss per row. The mean over rows becomes a sum over units, divided by
            `batch_size`.
        epsilon: What the run may spend; the noise is solved for. `inf` clips and adds no noise: not private.
        delta: The failure probability of the guarantee.
        epochs: Passes over the data: steps are `epochs` times units per `batch_size`, rounded up.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        unit_ids: One integer or string per row of the data set; all rows with the same id are one unit.
        unit: What a unit is ("patient"); by default "sample", or "user" with `unit_ids`.
        size: The public number of units (rounded is fine), for the add-remove relation, under which the true number is
            private.
        neighbours: The neighbouring relation; by default add-remove with `size`, and zero-out without it: there, the
            number of units is public, and the noise is the same.
        batch_size: The expected number of units in a step (default: that of the loader).
        steps: Instead of `epochs`: the number of steps.
        rows_each: The most rows of a unit shown in one step, drawn from the receipt's key (default: all of them).
        microbatch: The most rows in memory at a time (gradient accumulation); the result does not depend on it.
        autocast: Forward pass and loss in mixed precision of this type, such as `torch.bfloat16`.
        ledger: Where the run is charged; by default one in memory, which does not survive the process.
        subject: The data set's name in the ledger.
        checkpoint: A file, written every `every` steps. After a crash, run the same program again: lost steps are
            replayed, nothing is spent twice.
        every: Steps between checkpoints.
        private: The folder for the run's private files (keys); by default that of the ledger's SQLite file.
        stateful: Name -> what else has a `state_dict` and goes on with a resumed run: the scheduler, an average of
            weights.
        seed: Reproducible noise and sampling: "seeded: not private".
        curator: Receives each step's sum, private facts included, and errors about unusable rows (see `tacit.Curator`).
            No one else does.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The loop: `for batch in private: private.step(batch)`.

    Raises:
        TypeError: An argument is of the wrong kind (an optimizer class, a loader that is none).
        ValueError: Invalid data, model or options; before anything is charged.
        BudgetExceeded: The subject cannot afford the run; nothing was charged.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import tacit
        >>> rows = TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> private = tacit.make_private(
        ...     model,
        ...     optimizer,
        ...     DataLoader(rows, batch_size=10, shuffle=True),
        ...     nn.CrossEntropyLoss(),
        ...     epsilon=4.0,
        ...     delta=1e-3,
        ...     epochs=1,
        ...     clip=1.0,
        ...     ledger=tacit.Ledger("sqlite:///clinic.db"),
        ...     subject="clinic",
        ... )
        >>> for batch in private:
        ...     private.step(batch)
        >>> private.done, private.guarantee.epsilon <= 4.0
        (6, True)
    """
    del context  # its arguments are here; see takes_context
    curator = as_curator(curator, "make_private")
    _refuse_wrapped(model)
    body, ranks = uncompiled(model), team()
    refuse_live_statistics(list(body.named_modules()))
    trained = check_optimizer(optimizer, body)
    check_loader(loader)
    for value, what in (
        (every, "every"),
        (microbatch, "microbatch"),
        (size, "size"),
        (batch_size, "batch_size"),
        (rows_each, "rows_each"),
    ):
        if value is not None:
            check_count(value, what)
    if ledger is None and checkpoint is not None:
        raise Refusal("A run can be resumed only if its ledger is a file: give ledger=.")
    relation = Neighbours(neighbours or (Neighbours.ZERO_OUT if size is None else Neighbours.ADD_REMOVE))
    if size is None and relation is Neighbours.ADD_REMOVE:
        raise Refusal(
            "Give size=, the public number of units, rounded if you like: under add-remove the true number is private, "
            "and sampling rates and divisors must not depend on it."
        )
    criterion = per_row(loss, autocast)
    records = LoaderRecords(loader, unit_ids=unit_ids, unit=None if unit is None else str(unit), rows_each=rows_each)
    people, expected = size or len(records), batch_size or batching(loader)[0]
    length = steps_per_epoch(people, loader, expected)
    settled = Optimizer(
        name="make_private",
        steps=_steps(epochs, steps, length),
        sampler=Poisson(expected),
        query=ClippedGradient(clip),
    )
    promise = Promise(budget=Budget(epsilon, delta), unit=Unit(records.unit), neighbours=relation, size=people)
    check_promise(settled, promise)
    divisor, shards = settled.sampler.expected(people), shards_of(body, ranks)
    if shards is not None and checkpoint is not None:
        raise Refusal("A run of a sharded model keeps no checkpoint yet: leave checkpoint= out.")
    whole = nullcontext if shards is None else shards.gathered
    with whole():
        query = settled.query.open(body, _of_rows(criterion), expected=divisor, microbatch=microbatch)
        all_parameters = dict(body.named_parameters())
    like = likeness(records, training=True, curator=curator)
    workers = loader.num_workers if ranks is None else 0  # every rank reads the rows of its own portions
    try_workers(records, like, workers, curator)
    plainly = eager(model, loss)
    with plainly(), whole():
        _try_out(body, criterion, query, like)
        _check_labels(body, loss, records, like, curator)
        rehearse_portion(query, like, divisor, records, body)
    rehearse_optimizer(optimizer)
    kept = dict(stateful or {})
    check_stateful(optimizer, kept, resumable=checkpoint is not None)
    store = None if checkpoint is None or ledger is None else Store(checkpoint, ledger, private)
    modes = [name for name, module in body.named_modules() if module.training]
    kind = where_of(body).device.type
    settings = f"{(settled, promise, seed, microbatch, autocast, kind, name_of(loss), repr(optimizer))!r} {modes}"
    settings = f"{settings} {sorted(kept)}"
    with whole():
        zero = without_values(query.zero_sum())
        if ranks is not None:
            check_ranks(ranks, body, query, f"{settings} {checkpoint is None}", records)
    account = account_for(ranks, settled, promise, ledger, subject, seed=seed)
    if ranks is None or ranks.leads:
        mechanisms.check(zero, account.event, noise=query.split(account.scale))
    updater = TorchUpdater(optimizer, trained, kept)
    kind_of_run: Callable[..., Run] = Run if ranks is None else partial(TeamRun, team=ranks)
    if shards is not None:
        kind_of_run = partial(ShardedRun, team=shards.team, shards=shards, sum_like=zero)
    run = kind_of_run(
        model=body,
        records=records,
        optimizer=settled,
        account=account,
        query=query,
        updater=updater if shards is None else ShardedUpdater(updater, shards),
        measure="",
        store=store,
        every=every,
        note=f"make_private, {type(optimizer).__name__}, {sum(p.numel() for p in trained.values()):,} parameters",
        curator=curator,
        like=like,
        expected=divisor,
        workers=workers,
    )
    guard = GradientGuard(optimizer, {name: all_parameters[name] for name in trained})
    try:
        run.begin(settings=settings, data=records, whole=body)
    except BaseException:
        guard.remove()
        raise
    said: Any = assumptions(account, promise, named=unit_ids is not None) if run.leads else None
    return PrivateLoop(
        run,
        records,
        optimizer,
        guard,
        plainly,
        model=body,
        length=length,
        assumptions=said if ranks is None else ranks.share(said),
    )


def steps_per_epoch(units: int, loader: DataLoader[Any], batch_size: int | None = None) -> int:
    """Poisson batches of a pass: as many as the loader would have of so many units."""
    own, drop_last = batching(loader)
    each = batch_size or own
    return max(1, units // each if drop_last else math.ceil(units / each))


def _steps(epochs: int | None, steps: int | None, length: int) -> int:
    if (epochs is None) == (steps is None):
        raise TypeError(
            "make_private needs epochs=, or steps= instead: the whole run is charged before its first step."
        )
    if epochs is not None:
        check_count(epochs, "epochs")
        return epochs * length
    assert steps is not None
    return steps


def _refuse_wrapped(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Refusal(
            f"{type(model).__name__} averages gradients over processes before anybody has clipped them: give the model "
            "inside, model.module."
        )


def _of_rows(criterion: Any) -> Any:
    """The loss of a batch as the loop has it: what the loader gave, and labels of which the loss makes no use."""

    def loss(model: nn.Module, batch: tuple[Any, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = criterion(model, batch[0])
        return found

    return loss


def _try_out(model: nn.Module, criterion: Any, query: GradientQuery, like: Any) -> None:
    """Do model and loss take such batches, and does every rule hold? On blank rows, before anything is charged.

    Also in training mode, into which a loop may put the model later.
    """
    rows = change((like.inputs, like.labels), lambda t: t[:1].expand(3, *t.shape[1:]).contiguous())
    inputs, labels = to(blank(rows), where_of(model))
    try:
        with torch.no_grad():
            found = criterion(model, inputs)
    except Refusal:
        raise
    except Exception as error:  # about blank rows: its text reveals nothing private
        raise Refusal(
            f"The model or the loss does not take this loader's batches ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Nothing was charged."
        ) from error
    if not isinstance(found, torch.Tensor) or found.shape != (3,):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise Refusal(
            f"The loss must return one number per row, (3,) for a batch of three rows; it returned {what}: use "
            "reduction='none'. Nothing was charged."
        )
    query.check(inputs, labels)
    if not all(module.training for module in model.modules()):
        with _training(model):
            query.check(inputs, labels)


def _check_labels(model: nn.Module, loss: Any, records: LoaderRecords, like: Any, curator: Curator | None) -> None:
    """Class labels out of range, where labels are at hand."""
    labels = records.labels()
    if len(labels) and (isinstance(loss, Task) or (isinstance(like.inputs, list | tuple) and len(like.inputs) == 2)):
        if isinstance(loss, Task):
            check_labels(loss, records, curator)
            return
        with torch.no_grad():
            outputs = outputs_of(model, to(blank(parted(like.inputs)[0]), where_of(model)))
        attempt(check_classes, loss, outputs, labels, sentence=LABELS, curator=curator)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The model in training mode, but for layers with running statistics; its modes are put back after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, training in modes:
            module.training = training or not isinstance(module, _NormBase)
        yield
    finally:
        for module, training in modes:
            module.training = training
