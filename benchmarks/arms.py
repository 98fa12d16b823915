"""The arms of the gradient benchmarks: each turns a work into a step that returns the sum of clipped gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from paired import THREADS, Bar, RefusedError, Step

DEVICE = "cpu"  # where models and batches are; `gradients.py --device` sets it
Batch = tuple[Tensor, ...]
Loss = Callable[[Callable[..., Tensor], Batch], Tensor]
Sum = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A model, a batch and a loss per row, with the arms to compare and the bars to judge by."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Loss
    rows: int
    arms: tuple[str, ...]
    bars: tuple[Bar, ...] = ()
    reference: str = "no privacy"
    unit_size: int = 1  # rows per privacy unit
    rows_at_once: int | None = None  # for peers that hold one gradient per row and would not fit in memory
    check_rows: int | None = None  # rows on which the sums are checked; all when None
    peers_every: int = 1  # slow peers take part in every n-th round
    jax: bool = True


@dataclass(frozen=True)
class Problem:
    """A work with its weights and data drawn: the same for every arm and process."""

    work: Work
    clip: float
    model: nn.Module = field(init=False)
    batch: Batch = field(init=False)
    rows: int | None = None

    def __post_init__(self) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(0)
        object.__setattr__(self, "model", self.work.model().train().to(DEVICE))
        object.__setattr__(self, "batch", tuple(t.to(DEVICE) for t in self.work.batch(self.rows or self.work.rows)))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def no_privacy(problem: Problem) -> Step:
    """The same loss on the same rows without privacy: forward, mean, backward."""
    model, parameters = problem.model, problem.parameters

    def step() -> Sum:
        model.zero_grad(set_to_none=True)
        problem.work.loss(model, problem.batch).mean().backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    return step


def tacit(problem: Problem, *, units: bool = True) -> Step:
    try:
        from tacit.gradients import Engine
    except ImportError as error:
        raise RefusedError(f"refused: {error}") from error
    size = problem.work.unit_size
    labels = torch.arange(len(problem.batch[0])) // size if units and size > 1 else None
    engine = Engine(problem.model, problem.work.loss, clip=problem.clip)

    def step() -> Sum:
        return dict(engine(problem.batch, unit_ids=labels).sum)

    return step


def tacit_without_units(problem: Problem) -> Step:
    return tacit(problem, units=False)


def opacus_hooks(problem: Problem) -> Step:
    """Gradients per row from opacus' hooks, clipped and summed by its DPOptimizer."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    _refuse_units(problem)
    module = GradSampleModule(problem.model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(problem.parameters.values(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=problem.clip,
        expected_batch_size=len(problem.batch[0]),
        loss_reduction="sum",
    )

    def step() -> Sum:
        optimizer.zero_grad(set_to_none=True)
        for rows in _portions(problem):
            problem.work.loss(module, rows).sum().backward()
            optimizer.clip_and_accumulate()
            for p in problem.parameters.values():
                p.grad_sample = p.grad = None
        return {name: p.summed_grad for name, p in problem.parameters.items()}

    return step


def opacus_ghost(problem: Problem) -> Step:
    """Opacus' fast gradient clipping with ghost norms: two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    _refuse_units(problem)
    module = GradSampleModuleFastGradientClipping(problem.model, max_grad_norm=problem.clip, loss_reduction="sum")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(problem.parameters.values(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=problem.clip,
        expected_batch_size=len(problem.batch[0]),
        loss_reduction="sum",
    )

    def step() -> Sum:
        optimizer.zero_grad(set_to_none=True)
        loss = problem.work.loss(module, problem.batch)
        DPTensorFastGradientClipping(module, optimizer, loss, "sum").backward()
        return {name: p.grad for name, p in problem.parameters.items() if p.grad is not None}

    return step


def torch_func(problem: Problem) -> Step:
    """vmap(grad) over rows, or over units of equal size, then clip and sum.

    Attention runs in its plain form here: the fused kernel has no batching rule and would loop over the rows.
    """
    size = problem.work.unit_size
    model = problem.model
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    parameters = {name: p.detach() for name, p in problem.parameters.items()}

    def unit_loss(values: Sum, unit: Batch) -> Tensor:
        def call(*inputs: Tensor) -> Tensor:
            return functional_call(model, {**values, **frozen}, inputs)

        return problem.work.loss(call, unit).mean()

    unit_gradients = vmap(grad(unit_loss), in_dims=(None, 0))

    def step() -> Sum:
        total: Sum = {}
        for rows in _portions(problem):
            units = tuple(column.view(-1, size, *column.shape[1:]) for column in rows)
            with sdpa_kernel(SDPBackend.MATH):
                gradients = unit_gradients(parameters, units)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factor = (problem.clip / (norms + 1e-6)).clamp(max=1.0)
            for name, g in gradients.items():
                part = torch.einsum("i,i...->...", factor, g)
                total[name] = total[name] + part if name in total else part
        return total

    return step


def _refuse_units(problem: Problem) -> None:
    if problem.work.unit_size > 1:
        raise RefusedError("refused: opacus clips rows, not units of several rows")


def _portions(problem: Problem) -> list[Batch]:
    at_once = problem.work.rows_at_once or len(problem.batch[0])
    return list(zip(*(column.split(at_once) for column in problem.batch), strict=True))


ARMS: dict[str, Callable[[Problem], Step]] = {
    "no privacy": no_privacy,
    "null": no_privacy,
    "tacit": tacit,
    "tacit without units": tacit_without_units,
    "opacus hooks": opacus_hooks,
    "opacus ghost": opacus_ghost,
    "torch.func": torch_func,
}


def build(work: Work, arm: str, clip: float = 1.0, rows: int | None = None) -> Step:
    """The step of an arm, on a model and data of its own."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    make = ARMS[work.reference if arm == "null" else arm]
    step = make(Problem(work, clip, rows=rows))
    return step if DEVICE == "cpu" else waited_for(step)


def waited_for(step: Step) -> Step:
    """A step that is over when the device is done."""

    def whole() -> object:
        found = step()
        torch.accelerator.synchronize()
        return found

    return whole


def device_peak(step: Step) -> int:
    """Bytes of the device that a step needs at its peak, beyond what is there before it."""
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def one_by_one(work: Work) -> tuple[float, Sum]:
    """The slow, obvious answer: a backward pass per unit. The clip is the median norm, so that it bites for half."""
    problem = Problem(work, clip=1.0, rows=work.check_rows)
    torch.set_num_threads(1)  # on work this small, two threads mostly wait for each other; `Problem` sets two again
    parameters = problem.parameters
    units = list(zip(*(column.split(work.unit_size) for column in problem.batch), strict=True))

    def gradient(unit: Batch) -> tuple[Tensor, ...]:
        loss = work.loss(problem.model, unit).mean()
        return torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)

    def norm(gradients: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([g.norm() for g in gradients]).norm()

    clip = float(torch.stack([norm(gradient(unit)) for unit in units[:32]]).median())
    total = [torch.zeros_like(p) for p in parameters.values()]
    for unit in units:
        gradients = gradient(unit)
        factor = min(1.0, clip / float(norm(gradients)))
        torch._foreach_add_(total, gradients, alpha=factor)
    return clip, dict(zip(parameters, total, strict=True))


def difference(found: Sum, expected: Sum) -> float:
    """Relative L2 distance over all parameters together."""
    if set(found) != set(expected):
        raise RefusedError(f"wrong: no sum for {', '.join(sorted(set(expected) - set(found)))[:120]}")
    gap = sum(float((found[name].detach().double() - expected[name]).square().sum()) for name in expected)
    size = sum(float(expected[name].double().square().sum()) for name in expected)
    return (gap / size) ** 0.5
