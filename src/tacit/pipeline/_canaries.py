"""A whole pipeline with canaries in all of its private data, for `audit.run`: needs the model and no private row."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import adapt, audit
from tacit import data as sets
from tacit.audit import canaries as synthetic
from tacit.data import TensorRecords
from tacit.models import with_head
from tacit.pipeline import _data
from tacit.pipeline._budget import split
from tacit.pipeline._models import Built
from tacit.pipeline._run import carry_out
from tacit.pipeline._schema import Pipeline
from tacit.pipeline._schema_data import Data, Embedded, Images, Outputs, Texts, Video, count_of
from tacit.privacy import Ledger, Neighbours, events

_MOST = 10**8  # numbers in the gradients of all canaries; beyond, scores are losses


class CanaryRun:
    """One run of a recipe on canaries, each of them somebody who is in the data of every private stage.

    Calling it with a bool per canary carries the recipe out in a temporary folder, with its own model, settings and
    noise, and returns a score for each canary. One that is out has rows that are not numbers and contribute zero
    (zero-out; under the other relations it is a special case); a text, which always is one, is replaced by another, at
    twice the claim where the relation is not replace-one. Public data of [pretrain] is read; no private data is.

    Args:
        recipe: What `read` returned.
        canaries: How many.
        seed: Of the canaries, which are public.

    Raises:
        ValueError: No stage of the recipe leaves anything in the model.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from tacit import audit, pipeline
        >>> recipe = Path(tempfile.mkdtemp()) / "mine.toml"
        >>> _ = recipe.write_text('''
        ... model.name = "embedded"
        ... data.kind = "embedded"
        ... budget = {epsilon = 8.0, delta = 1e-5}
        ... finetune = {scheme = "linear", head = "keep", steps = 2, lr = 0.1}
        ... ''')
        >>> run = pipeline.CanaryRun(pipeline.read(recipe), canaries=40)
        >>> found = audit.run(run, 40, run.claim, neighbours=run.neighbours, name="mine")
        >>> found.holds, round(found.claimed, 3)
        (True, 1.666)
    """

    def __init__(self, recipe: Pipeline, canaries: int = 200, *, seed: int = 0) -> None:
        if recipe.finetune is None and recipe.adapt is None:
            raise ValueError("Canaries show in a model, and this recipe has neither [finetune] nor [adapt].")
        self.canaries, self.seed, self.neighbours = canaries, seed, recipe.budget.neighbours
        self._recipe = _without_outputs(recipe)
        self._charged: list[events.DpEvent] = []
        self._of_stage: dict[str, synthetic.Canaries] = {}
        self._instead: dict[str, synthetic.Canaries] = {}

    def claim(self) -> audit.Claim:
        """What the last run charged for somebody who is in all of the data, as a mu where it has one."""
        found = audit.as_mu(events.compose(self._charged), self.neighbours)
        if not self._instead or self.neighbours is Neighbours.REPLACE_ONE or found.mu is None:
            return found
        return replace(found, mu=2 * found.mu)  # gone, and somebody else there: Dong et al. 2022, theorem 2.14

    def __call__(self, included: Tensor) -> Tensor:
        """Run the recipe with the canaries that are in, and score all of them by what changed in the model."""
        models: list[tuple[str, nn.Module]] = []

        def load(recipe: Pipeline, built: Built) -> dict[str, _data.Loaded]:
            models.append(("start", copy.deepcopy(built.model)))
            return self._load(recipe, built, included)

        def after(stage: str, model: nn.Module) -> None:
            models.append((stage, copy.deepcopy(model)))

        with tempfile.TemporaryDirectory() as folder:
            settings = replace(self._recipe.budget, ledger=Path(folder) / "ledger.db")
            recipe = replace(self._recipe, budget=settings)
            object.__setattr__(recipe, "home", self._recipe.home)
            outcome = carry_out(recipe, Path(folder) / "out", load, after=after)
            self._charged = _charged(outcome.ledger)
        return self._scores(models)

    def _load(self, recipe: Pipeline, built: Built, included: Tensor) -> dict[str, _data.Loaded]:
        found: dict[str, _data.Loaded] = {}
        if recipe.pretrain is not None:
            found["pretrain"] = _data.load(recipe, recipe.pretrain.data, built, public=True)
        sources = () if recipe.calibrate is None else recipe.calibrate.sources
        wanted = {
            "data": recipe.data if recipe.finetune is not None else None,
            "adapt": None if recipe.adapt is None else recipe.adapt.data,
            "calibrate": None if recipe.calibrate is None else recipe.calibrate.data,
        }
        for name, settings in wanted.items():
            if settings is not None and not isinstance(settings, Outputs):
                shown = recipe.finetune.augment if name == "data" and recipe.finetune is not None else None
                found[name] = self._rows(recipe, settings, built, included, name, shown)
                if name == "calibrate":
                    whose = [sources[place % len(sources)] for place in range(len(found[name]))]
                    object.__setattr__(found[name], "sources", whose)
        return found

    def _rows(
        self, recipe: Pipeline, settings: Data, built: Built, included: Tensor, name: str, augment: int | None
    ) -> _data.Loaded:
        """The canaries as rows of one stage's data; those that are out cannot be read."""
        unit = recipe.budget.unit
        owners = None if unit == "sample" else [f"canary-{place}" for place in range(self.canaries)]
        if isinstance(settings, Texts):
            return self._texts(settings, built, included, name, owners, unit)
        found = synthetic.images(
            self.canaries, _shape(settings, built), classes=count_of(settings.classes), seed=self.seed
        )
        self._of_stage[name] = found
        gone = torch.full_like(found.rows[:1], float("nan"))
        there = included.view(-1, *[1] * (found.rows.dim() - 1))
        video = isinstance(settings, Video)
        table = TensorRecords(
            torch.where(there, found.rows, gone),
            found.labels,
            owners if owners is not None or not video else list(range(self.canaries)),
            unit=unit if owners else None,
            augment=augment,
        )
        return _data.Loaded(
            records=table, inputs=table.read, labels=found.labels, blank=torch.zeros_like(gone), owners=owners
        )

    def _texts(
        self, settings: Texts, built: Built, included: Tensor, name: str, owners: list[str] | None, unit: str
    ) -> _data.Loaded:
        if built.tokenizer is None:
            raise ValueError("Texts need a model with a tokenizer: transformers:NAME_OR_FOLDER.")
        options: dict[str, Any] = {"unit": unit if owners else None, "max_length": settings.max_length}
        length, shown, labels = min(settings.max_length, 32), [], []
        for seed in (self.seed, self.seed + 1):  # the canary, and who is there instead of it
            drawn = synthetic.texts(
                self.canaries,
                length,
                vocabulary=len(built.tokenizer),
                classes=count_of(settings.classes),
                seed=seed,
            )
            shown.append([built.tokenizer.decode(row) for row in drawn.rows["input_ids"]])
            labels.append(drawn.labels)
        everybody = sets.Texts(built.tokenizer, [*shown[0], *shown[1]], torch.cat(labels), **(options | {"unit": None}))
        whole = torch.arange(2 * self.canaries).view(2, -1)
        found = [synthetic.Canaries(everybody.read(part), each) for part, each in zip(whole, labels, strict=True)]
        self._of_stage[name], self._instead[name] = found
        texts = [one if there else other for one, other, there in zip(*shown, included.tolist(), strict=True)]
        truth = torch.where(included, labels[0], labels[1])
        records = sets.Texts(built.tokenizer, texts, truth, owners, **options)
        blank = records.synthetic().inputs
        return _data.Loaded(records=records, inputs=records.read, labels=truth, blank=blank, owners=owners)

    def _scores(self, models: list[tuple[str, nn.Module]]) -> Tensor:
        """The sum of what each private stage shows, each on a scale of its own."""
        total = torch.zeros(self.canaries, dtype=torch.float64)
        before = models[0][1]
        for stage, model in models[1:]:
            if stage != "pretrain":
                name = "adapt" if stage == "adapt" else "data"
                if stage == "finetune" and self._recipe.finetune is not None and self._recipe.finetune.head == "new":
                    classes = count_of(getattr(self._recipe.data, "classes", 2))
                    before = with_head(before, classes, bias=self._recipe.finetune.bias)
                found = _score(before, model, self._of_stage[name], self._instead.get(name), stage)
                total += found / found.std().clamp_min(1e-30)
            before = model
        return total


def _score(
    before: nn.Module, after: nn.Module, rows: synthetic.Canaries, instead: synthetic.Canaries | None, stage: str
) -> Tensor:
    known = dict(before.named_parameters())
    moved = {n: p for n, p in after.named_parameters() if n in known and not torch.equal(p, known[n])}
    if moved and len(rows) * sum(p.numel() for p in moved.values()) <= _MOST:
        uncertain = (lambda logits, _: adapt.entropy(logits)) if stage == "adapt" else None
        return synthetic.gradient_scores(before, after, rows, instead=instead, loss=uncertain)
    return synthetic.loss_scores(before, after, rows)


def _without_outputs(recipe: Pipeline) -> Pipeline:
    """The recipe without what leaves nothing in a model and needs files: every other stage keeps its share."""
    shares = {part.stage: part.share for part in split(recipe)}
    settings: dict[str, Any] = {"audit": None}
    if recipe.calibrate is not None and isinstance(recipe.calibrate.data, Outputs):
        settings["calibrate"] = None
        for name in ("tune", "finetune", "adapt"):
            if name in shares:
                settings[name] = replace(getattr(recipe, name), share=shares[name], epsilon=None)
    if recipe.finetune is not None:
        kept = settings.get("finetune", recipe.finetune)
        settings["finetune"] = replace(kept, evaluate=None, evaluate_public=False)
    made = replace(recipe, **settings)
    object.__setattr__(made, "home", recipe.home)
    return made


def _shape(settings: Images | Video | Embedded, built: Built) -> tuple[int, ...]:
    if isinstance(settings, Embedded):
        return (1, 28, 28)
    if isinstance(settings, Video):
        if settings.size is None:
            raise ValueError("Say data.size: canaries are synthetic, made without reading a video.")
        return (settings.frames, 3 if settings.colour else 1, settings.size, settings.size)
    if built.shape is None:
        raise ValueError("This model does not say what images it takes: say data.size.")
    return (built.shape.channels, built.shape.height, built.shape.width)


def _charged(ledger: Ledger) -> list[events.DpEvent]:
    """All charges that count for one person: of sources, which are disjoint, those of the one that was charged most."""
    of_subject: dict[str, list[events.DpEvent]] = {}
    for entry in ledger.entries():
        if entry.kind == "charge":
            of_subject.setdefault(entry.subject, []).append(events.from_json(entry.body["event"]))
    sources = [name for name in of_subject if name.startswith("source ")]
    most = max(sources, key=lambda name: ledger.spent(name).epsilon, default=None)
    return [event for name, found in of_subject.items() if name not in sources or name == most for event in found]
