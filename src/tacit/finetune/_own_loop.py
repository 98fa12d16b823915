"""A training loop that its owner keeps: Poisson batches to iterate over, and one private step for each."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tacit._refusals import Refusal
from tacit._saving import save_result
from tacit.finetune._loader import LoaderRecords
from tacit.finetune._loop import Run
from tacit.finetune._torch_optimizer import GradientGuard
from tacit.models import WeightFormat, uncompiled
from tacit.privacy import Guarantee, Ledger

_OTHER = (
    "A private step takes a batch of private.loader (or of `for batch in private`), which stands for a Poisson "
    "subsample that the receipt draws; got {what}. A batch of another loader, shuffled or drawn by hand, is no such "
    "subsample, and nothing would hold."
)


class PrivateBatch:
    """One private step to come: a Poisson subsample that the receipt draws when the step is made.

    It shows no rows, because rows of a private batch must not be looked at; `private.step` reads them, in portions that
    fit into memory.

    Args:
        owner: The loop that it is a batch of.
    """

    __slots__ = ("owner", "used")

    def __init__(self, owner: PrivateLoop) -> None:
        self.owner, self.used = owner, False

    def to(self, *where: Any, **how: Any) -> PrivateBatch:
        """The batch itself: its rows go where the model is."""
        del where, how
        return self

    def __repr__(self) -> str:
        return "PrivateBatch(used)" if self.used else "PrivateBatch()"


class PoissonLoader:
    """The loader of a private loop: as many Poisson batches as a pass of the given loader has, again for each epoch.

    Args:
        owner: The loop.
        length: Steps of an epoch.
    """

    def __init__(self, owner: PrivateLoop, length: int) -> None:
        self._owner, self._length = owner, length

    @property
    def dataset(self) -> Any:
        """That of the given loader."""
        return self._owner.dataset

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PrivateBatch]:
        """The steps that are left of the present epoch, or those of the next one."""
        done = self._owner.done
        return self._owner.batches(min(self._length - done % self._length, self._owner.steps - done))


class PrivateLoop:
    """A model, an optimizer and a receipt that pays for `steps` private steps; see `make_private`.

    Iterate over `loader`, an epoch at a time, or over the loop itself, which goes on to the last step. Every batch is
    for one `step`. Beyond the last step there is nothing to iterate over. Public facts: `loader` (the given one with
    Poisson subsampling), `steps` (in all), `done`, `noise_multiplier` (relative to the clip), `guarantee`.

    Args:
        run: The run that was charged.
        records: The rows of the given loader.
        optimizer: The optimizer that was given.
        guard: Watches over the optimizer's gradients.
        eager: Makes compiled code run as it was written, for as long as a step computes.
        model: The model that is trained, in place.
        length: Steps of an epoch.
        assumptions: What the guarantee rests on, for the card.
    """

    def __init__(
        self,
        run: Run,
        records: LoaderRecords,
        optimizer: torch.optim.Optimizer,
        guard: GradientGuard,
        eager: Callable[[], AbstractContextManager[Any]],
        *,
        model: nn.Module,
        length: int,
        assumptions: list[str],
    ) -> None:
        self._run, self.model, self.optimizer = run, model, optimizer
        self.loader = PoissonLoader(self, length)
        self.steps = run.optimizer.steps
        self.noise_multiplier = run.account.scale
        self.assumptions = assumptions
        self._guard, self._records, self._eager = guard, records, eager
        self._resumed = run.done > 0
        self._saved = run.done
        self._statistics = [
            (m, {name: value.clone() for name, value in m.named_buffers()})
            for m in model.modules()
            if isinstance(m, _NormBase) and m.track_running_stats
        ]
        if run.finished:
            run.end()
            guard.remove()

    @property
    def done(self) -> int:
        """Steps made, those before a resumption included."""
        return self._run.done

    @property
    def dataset(self) -> Any:
        """The data set of the given loader."""
        return self._records.loader.dataset

    @property
    def guarantee(self) -> Guarantee:
        """What everybody in the data is promised: for the whole run, also while it goes on."""
        return self._run.account.guarantee

    @property
    def ledger(self) -> Ledger:
        """The ledger that was charged; of several ranks the first one has it."""
        return self._run.account.ledger

    @property
    def receipt(self) -> str:
        """The id of the receipt that paid for the run."""
        return self._run.receipt_id

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[PrivateBatch]:
        return self.batches(self.steps - self.done)

    def batches(self, count: int) -> Iterator[PrivateBatch]:
        """`count` batches; at the end of the last step the run ends."""
        if count <= 0 and not self._resumed:
            raise RuntimeError(
                f"All {self.steps:,} private steps of this loop were made, and its budget was charged for no more: "
                "call make_private again for another run (it is charged again)."
            )
        return self._batches(count)

    def _batches(self, count: int) -> Iterator[PrivateBatch]:
        for _ in range(count):
            if self._run.finished:
                return
            yield PrivateBatch(self)
        if self.done == self.steps:
            self.finish()

    def step(self, batch: PrivateBatch) -> None:
        """One private step: `backward`, `optimizer.step()` and `optimizer.zero_grad()`.

        Args:
            batch: From `loader`, or from iterating over the loop; each is for one step.

        Raises:
            TypeError: The batch is of another loader.
            RuntimeError: The batch was used, or the loop has ended.
        """
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batch: PrivateBatch) -> None:
        """In place of `loss.backward()`: every trained parameter gets a private gradient as its `.grad`.

        Formal guarantee: what is set is one release on the charged receipt (see `Run.step`); what `optimizer.step()`,
        a scheduler, gradient clipping or an average of weights do with it is post-processing. Gradients that were there
        are replaced, not added to.

        Args:
            batch: From `loader`, or from iterating over the loop; each is for one step.

        Raises:
            TypeError: The batch is of another loader.
            RuntimeError: The batch was used, or the loop has ended.
        """
        if not isinstance(batch, PrivateBatch) or batch.owner is not self:
            what = "a batch of another private loop" if isinstance(batch, PrivateBatch) else f"a {type(batch).__name__}"
            raise TypeError(_OTHER.format(what=what))
        if batch.used or self._run.finished:
            raise RuntimeError("This batch was used, or the loop has ended: each batch is for one private step.")
        self._keep()
        self._freeze()
        with self._guard.computing(), self._eager():
            self._run.step()
        batch.used = True

    def finish(self) -> None:
        """End the run: the last weights are kept, unused steps settled, the key destroyed. Safe to call again.

        It is called by itself behind the last step, and by `save`. After leaving the loop early, call it (or use the
        loop in a `with` block): a subject whose mode refunds gets back what the steps not made would have cost.
        """
        if not self._run.finished and self._run.begun:
            self._freeze()
            self._run.end()
            self._guard.remove()

    def save(
        self, folder: str | Path, *, format: WeightFormat = "plain", tokenizer: Any = None, title: str | None = None
    ) -> Path:
        """End the run and write the model with its privacy card and guarantee; see `finetune.Fitted.save`.

        Args:
            folder: Made if there is none.
            format: `"plain"` (LoRA merged), `"peft"` or `"state_dict"`.
            tokenizer: Saved too, if given.
            title: What stands above the card.

        Returns:
            The folder. Over several ranks all of them call this, and the first one writes.

        Raises:
            ValueError: The model is sharded.
        """
        self.finish()
        if self._run.sharded:
            raise Refusal(
                "No rank holds the whole of a sharded model: write it with torch.distributed.checkpoint, and "
                "private.guarantee beside it. Nothing is lost."
            )
        if not self._run.leads:
            return Path(folder)
        return save_result(
            folder,
            self.model,
            self,
            stage="finetune",
            format=format,
            tokenizer=tokenizer,
            title=title,
            receipt=self.receipt,
        )

    def _freeze(self) -> None:
        """Put layers with running statistics back into evaluation mode, and their statistics to what they were.

        They are released with the weights, and a forward pass of somebody's rows in training mode (a loss that is
        computed to be looked at) moves them, without noise.
        """
        for module, kept in self._statistics:
            module.eval()
            for name, value in module.named_buffers():
                value.copy_(kept[name])

    def _keep(self) -> None:
        """A checkpoint of the last step, once everything that belongs to it (optimizer, scheduler) has been done."""
        if self._run.save_is_due and self._run.done > self._saved:
            self._run.save()
            self._saved = self._run.done

    def __enter__(self) -> PrivateLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error, what is left may still be resumed
            self.finish()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A private loop holds a key and a receipt of this process: save the model with private.save.")

    def __repr__(self) -> str:
        made = self.guarantee
        return f"PrivateLoop({self.done:,} of {self.steps:,} steps, epsilon {made.epsilon:.4g}, delta {made.delta:g})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(f'{self.done:,} of {self.steps:,} private steps')}</p>{self.guarantee._repr_html_()}"


def eager(model: nn.Module, loss: Any) -> Callable[[], AbstractContextManager[Any]]:
    """What lets compiled code run as it was written; nothing, if nothing is compiled.

    The rules of `gradients` look at the functions that a model calls one by one, and a compiled graph shows none.
    """
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    if compiled or uncompiled(model) is not model or hasattr(loss, "_torchdynamo_orig_callable"):
        return lambda: torch.compiler.set_stance("force_eager")
    return nullcontext
