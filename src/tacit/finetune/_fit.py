"""`fit`: private fine-tuning in one call."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from tacit._context import PrivacyContext, takes_context
from tacit._curator import Curator
from tacit._deprecation import renamed_argument
from tacit.data import TensorRecords, unit_ids_of
from tacit.distributed import team
from tacit.finetune._account import Promise, assumptions, check_promise, cost
from tacit.finetune._default import default_optimizer
from tacit.finetune._dry_run import check_labels, dry_run, rehearse_portion
from tacit.finetune._evaluation import Evaluation, Evaluator
from tacit.finetune._features import Layers
from tacit.finetune._fit_checks import (
    check_receipt,
    read_held_out,
    rehearse_evaluation,
    task_of,
    tracking,
    warn_if_blind,
)
from tacit.finetune._fitted import Fitted
from tacit.finetune._linear_probe import linear_probe
from tacit.finetune._loop import Run
from tacit.finetune._loss_curve import LossTracker, TrackLoss
from tacit.finetune._optimizers import Optimizer, called
from tacit.finetune._ranks import account_for, check_ranks
from tacit.finetune._reading import try_workers, varies
from tacit.finetune._saving import Store
from tacit.finetune._sources import agree, prepared, read_records, workers_of
from tacit.finetune._standardise import RowNorm, Standardise
from tacit.finetune._tasks import Task, loss_of
from tacit.finetune._team_run import TeamRun
from tacit.finetune._updates import KNOWS_NOISE, Updater
from tacit.finetune._workers import check_workers
from tacit.models import check_scheme
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, Unit, mechanisms
from tacit.privacy.events import check_count
from tacit.progress import shown
from tacit.recipes import Progress


@takes_context
def fit(
    model: nn.Module,
    data: Any,
    *,
    optimizer: Optimizer | None = None,
    delta: float,
    epsilon: float | None = None,
    receipt: Receipt | None = None,
    scheme: str = "selective",
    unit: Unit | str | None = None,
    unit_ids: Any = None,
    units: Unit | str | None = None,
    optimiser: Optimizer | None = None,
    size: int | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    classes: int | None = None,
    task: Task | None = None,
    head: Literal["new", "keep"] = "new",
    bias: bool = True,
    init: Literal["pretrained", "scratch"] = "pretrained",
    features: Layers | None = None,
    last_blocks: int | None = None,
    standardise: Standardise | RowNorm | None = None,
    rows_each: int | None = None,
    augment: int | None = None,
    ledger: Ledger | None = None,
    subject: str | None = None,
    evaluate: Evaluation | None = None,
    track_loss: TrackLoss | bool = False,
    checkpoint: str | Path | None = None,
    every: int = 100,
    private: str | Path | None = None,
    microbatch: int | None = None,
    workers: int | None = None,
    seed: int | None = None,
    curator: Curator | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Fitted:
    """Fine-tune `model`, in place, on private labelled data; every unit is protected by (epsilon, delta).

    Formal guarantee: unit, that of the data; neighbours as given, where a unit that takes another's place brings an id
    that no other unit has (with another's id its rows would join that unit's, and two would change). Each step is one
    release of a sum to which a unit adds at most the clip (see the optimizer for how steps compose); everything else
    that the returned model depends on is public or charged on the same ledger. Dropout is off and running statistics
    stay as they are, so that a step depends on its rows, the weights and the key alone.

    Args:
        model: Any torch model; it is trained in place.
        data: (inputs, labels) or (inputs, labels, owners) in tensors or arrays, a data set of (input, label) items, a
            `DataLoader`, a pandas DataFrame, a `datasets.Dataset`, or any `data.Records` such as `data.VideoClips`. The
            privacy unit is what the data group: records state it (`.unit`), a plain row is a "sample".
        optimizer: `DPSGD`, `DPGD`, `DPFTRL`, `AdpClip`, `AdpAlloc`, `GEP` or `DPZO`: sampling, query, noise and update.
            A classifier's head alone (scheme "linear") needs none: then rows have norm 1, and learning rate and steps
            of `DPGD` come from budget and size, as `tune.suggest` says.
        delta: The failure probability of the guarantee.
        epsilon: What the run may spend; the noise is solved for. `inf` clips and adds no noise: not private.
        receipt: The run is paid for already, with exactly `optimizer.event` (a trial of `tune`): then no `epsilon`,
            `ledger` or `checkpoint`; relation and unit are the receipt's, and the guarantee is that of this run alone.
            It serves one run: an interrupted one is charged again.
        scheme: Which parameters are trained (see `models.select`).
        unit: The kind of unit ("patient"). For records it may be left out and must agree with them: to protect a larger
            unit, group the records first (`records.group_by(ids, unit="patient")`).
        unit_ids: One integer or string per row of tensors or a data set; all rows with the same id are one unit. The
            name of a column, for a DataFrame or a `datasets.Dataset`; a function of a file, for a data set that lists
            its `samples` (ImageFolder).
        size: The public number of units (rounded is fine). Sampling rates and divisors come from it. Under add-remove
            the true number is private, so it is required; elsewhere it is the number of units.
        neighbours: The neighbouring relation.
        classes: The number of classes of a new head.
        task: Loss, measures and outputs other than classes: `Labels`, `NextToken`.
        head: "new": a fresh head for `classes` classes (or the outputs of `task`), zero at the start; "keep": the
            model's own.
        bias: Whether the new head has a bias.
        init: "scratch" draws all parameters anew: nothing pretrained.
        features: "last" or "all" caches features once and trains the head alone (scheme "linear", which does it by
            itself where it can).
        last_blocks: Train this many blocks from the end, as the scheme says, and the head. What comes into them is
            computed once for each row and cached: the blocks below never run again. See `cache_blocks`.
        standardise: What is done to cached features first. `RowNorm`: each row is scaled to one norm, free.
            `Standardise`: their mean and scale are released, and used.
        rows_each: The most rows of a unit shown in one step.
        augment: The number of augmented views of each row, all of one unit.
        ledger: Where the run is charged; by default one in memory, which does not survive the process.
        subject: The data set's name in the ledger.
        evaluate: Data to evaluate on: public, or with a budget of its own.
        track_loss: Estimate the training loss from the released gradients, free of charge (`fitted.loss_curve`); a
            `TrackLoss` with patience= also stops where it rises.
        checkpoint: A file, written every `every` steps. Repeat the same call after a crash to resume: lost steps are
            replayed, nothing is spent twice. Without it an interrupted run has spent its budget for nothing.
        every: Steps between checkpoints.
        private: The folder for the run's private files (keys); by default that of the ledger's SQLite file.
        microbatch: The most rows in memory at a time; the result does not depend on it.
        workers: Processes that read (decode, transform) the rows of the next steps while the model computes; the
            result does not depend on it. By default those of a `DataLoader`, otherwise none: rows are read in this
            process, as is best for what lies in memory.
        seed: Reproducible noise and sampling: "seeded: not private".
        curator: Called with a `tacit.StepEvent` before each step's noise, and with a `tacit.ErrorEvent` if rows
            cannot be used. What it raises is ignored, but for what ends a process.
        progress: True shows a bar with the epsilon spent so far; a function gets the same facts.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The fine-tuned model with its guarantee; every value in it is public or was released.

    Raises:
        ValueError: Invalid data, labels or options; before anything is charged.
        BudgetExceeded: The subject cannot afford the run; nothing was charged.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from tacit import Ledger, finetune
        >>> inputs, labels = torch.randn(60, 4), torch.arange(60) % 2
        >>> fitted = finetune.fit(
        ...     nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
        ...     (inputs, labels),
        ...     unit="patient",
        ...     unit_ids=torch.arange(60) // 3,  # three rows each
        ...     size=20,
        ...     scheme="full",
        ...     optimizer=finetune.DPSGD(batch_size=10, steps=5, lr=0.5),
        ...     epsilon=4.0,
        ...     delta=1e-3,
        ...     ledger=Ledger("sqlite:///clinic.db"),
        ...     subject="clinic",
        ... )
        >>> fitted.guarantee.epsilon <= 4.0, str(fitted.guarantee.unit)
        (True, 'patient')
    """
    del context  # its arguments are here; see takes_context
    optimizer = renamed_argument("optimiser", optimiser, "optimizer", optimizer, where="finetune.fit")
    check_scheme(scheme)
    if optimizer is not None or scheme != "linear" or receipt is not None:
        optimizer = called(optimizer)
    elif standardise is None:
        standardise = RowNorm()  # what the default is for
    unit = renamed_argument("units", units, "unit", unit, where="finetune.fit")
    named, relation = None if unit is None else Unit(unit), Neighbours(neighbours)
    rows = standardise if isinstance(standardise, RowNorm) else None
    paid = standardise.paid if isinstance(standardise, RowNorm) else standardise
    if receipt is not None:
        check_receipt(receipt, named, evaluate, given=(epsilon, ledger, subject, checkpoint, paid))
        named, relation = receipt.unit, receipt.neighbours
    elif epsilon is None:
        raise ValueError("Give epsilon=, what this run may spend, or receipt=, what paid for it.")
    ranks = team()
    if ranks is not None and (standardise is not None or workers):
        raise ValueError(
            "A run over several ranks takes no standardise= or workers=, and needs optimizer=: leave the one out and "
            "give the other."
        )
    for value, what in ((every, "every"), (microbatch, "microbatch"), (size, "size")):
        if value is not None:
            check_count(value, what)
    workers = 0 if ranks is not None else check_workers(workers_of(data) if workers is None else workers)
    how: dict[str, Any] = {"model": model, "curator": curator}
    records = read_records(data, named, unit_ids=unit_ids, rows_each=rows_each, augment=augment, **how)
    whom, ids = agree(records, named), unit_ids_of(records)
    task, people = task_of(task, classes, model), len(records) if size is None else size
    if optimizer is None:
        given = Budget(cast(float, epsilon), delta)
        optimizer = default_optimizer(given, people, scheme=scheme, task=task, rows=standardise)
    if ranks is not None and optimizer.update.rule in KNOWS_NOISE:
        raise ValueError(f"The rule {optimizer.update.rule!r} is for runs of one process.")
    tracked = tracking(track_loss, optimizer)
    if ranks is not None and tracked is not None:
        raise ValueError("A run over several ranks takes no track_loss=: leave it out.")
    optimizer.check(relation, resumable=checkpoint is not None, named=ids is not None)
    if size is None and relation is Neighbours.ADD_REMOVE:
        raise ValueError(
            "Give size=, the public number of units, rounded if you like: under add-remove the true number is private, "
            "and sampling rates and divisors must not depend on it."
        )
    if paid is not None and checkpoint is not None:
        raise ValueError("A run with standardise cannot be resumed: leave checkpoint= out.")
    if ledger is None and checkpoint is not None:
        raise ValueError("A run can be resumed only if its ledger is a file: give ledger=.")
    check_labels(task, records, curator)
    held_out = None if evaluate is None else read_held_out(evaluate, task, whom, relation, ledger, **how)
    optimizer.check_size(people, len(records))
    stops = any(each is not None and each.patience is not None for each in (evaluate, tracked))
    budget = cost(receipt, delta) if receipt is not None else Budget(epsilon or 0.0, delta)
    promise = Promise(budget=budget, unit=whom, neighbours=relation, size=people, stops=stops)
    if receipt is None:
        check_promise(optimizer, promise)
    model = prepared(model, task.outputs, scheme=scheme, head=head, bias=bias, init=init, seed=seed or 0)
    kind = next(model.parameters()).device.type
    settings = repr((optimizer, promise, scheme, task, features, seed, microbatch, evaluate, kind))
    settings += "" if rows is None else repr(rows)
    settings += "" if tracked is None or tracked.patience is None else repr(tracked)
    settings += "" if last_blocks is None else f"last_blocks={last_blocks}"
    store = None if checkpoint is None or ledger is None else Store(checkpoint, ledger, private)
    if store is not None and " at 0x" in settings:
        raise ValueError(
            "A run is resumed by what its parts print: give your own task or parts a repr of their values."
        )
    with linear_probe(
        model,
        records,
        held_out,
        scheme=scheme,
        layers=features,
        last_blocks=last_blocks,
        wanted=standardise is not None,
        curator=curator,
        strict=store is not None,
        workers=workers,
        team=ranks,
    ) as ready:
        if ready.records is not records:
            workers = 0  # features lie in memory
        if rows is not None and paid is None:
            ready.standardised(rows.normalizer())
        expected = optimizer.sampler.expected(promise.size)
        query = optimizer.query.open(ready.body, loss_of(task), expected=expected, microbatch=microbatch)
        like = dry_run(ready.body, ready.records, query, curator)
        try_workers(ready.records, like, workers, curator)
        rehearse_portion(query, like, expected, ready.records, ready.body)
        if evaluate is not None and ready.held_out is not None:
            dry_run(ready.body, ready.held_out, curator=curator)
            tried = Evaluator(evaluate, ready.held_out, task, curator, workers)
            rehearse_evaluation(tried, ready.body, ready.held_out, trained=head == "keep" and receipt is None)
        if ranks is not None:
            check_ranks(ranks, ready.body, query, f"{settings} {receipt and receipt.id}", records)
        trained = {name: p for name, p in ready.body.named_parameters() if p.requires_grad}
        if tracked is not None:
            tracked.check_run(trained, optimizer, rows_drawn=varies(ready.records))
        optimizer.update.check(trained.values())
        others = [] if paid is None else [paid.event if rows is None else paid.mean_event]
        leads = ranks is None or ranks.leads
        account = account_for(ranks, optimizer, promise, ledger, subject, receipt=receipt, others=others, seed=seed)
        if leads:
            optimizer.check_split(query, account.scale)
            mechanisms.check(query.zero_sum(), account.event, noise=query.split(account.scale))
        if paid is not None:
            of_whom = (cast(TensorRecords, ready.records), promise.size, account.ledger, account.subject, seed)
            ready.standardised(paid.release(*of_whom) if rows is None else rows.normalizer(paid.release_mean(*of_whom)))
        trained = {name: p for name, p in ready.body.named_parameters() if p.requires_grad}
        noise = account.scale * math.hypot(*query.zero_sum().bounds.values()) / expected  # of each number of a mean
        evaluator = None
        if evaluate is not None and ready.held_out is not None:
            evaluator = Evaluator(evaluate, ready.held_out, task, curator, workers)
        losses = None
        if tracked is not None:
            losses = LossTracker(tracked, trained, optimizer, size=promise.size, rows_drawn=varies(ready.records))
        kind_of_run = Run if ranks is None else partial(TeamRun, team=ranks)
        run = kind_of_run(
            model=ready.body,
            records=ready.records,
            optimizer=optimizer.over(ids),
            account=account,
            query=query,
            updater=Updater(optimizer.update, trained, optimizer.steps, noise=noise),
            measure=task.measure,
            evaluator=evaluator,
            losses=losses,
            store=store,
            every=every,
            note=f"{optimizer.name}, {scheme}, {sum(p.numel() for p in trained.values()):,} parameters",
            curator=curator,
            like=like,
            expected=expected,
            workers=workers,
        )
        run.begin(settings=settings, data=records, whole=ready.model)
        with shown(progress if leads else False) as run.progress:
            done = run.train()
        public = evaluate is not None and evaluate.public and receipt is None
        if public and run.history and ready.held_out is not None:
            warn_if_blind(run.history[-1].scores, ready.held_out, "after training")
        model = ready.finish()
    facts: dict[str, Any] | None = None
    if leads:
        facts = {
            "guarantee": account.guarantee,
            "noise_multiplier": run.account.scale,
            "steps": done,
            "history": run.history,
            "receipt": run.receipt.id,
            "assumptions": assumptions(account, promise, named=ids is not None),
        }
    return Fitted(
        model=model,
        scheme=scheme,
        trained=sum(p.numel() for p in trained.values()),
        ledger=None if receipt is not None or not leads else account.ledger,
        loss_curve=[] if losses is None else losses.curve,
        **(facts if ranks is None else ranks.share(facts)),  # type: ignore[arg-type]
    )
