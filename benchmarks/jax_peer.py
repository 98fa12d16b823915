"""jax-privacy's clipped gradient on nets of the same shapes, compared with its own non-private step.

Runs in an environment of its own (`gradients.py` makes it) and prints one JSON object:

    python jax_peer.py WORK time ROUNDS      seconds per round of "private" and "plain"
    python jax_peer.py WORK memory ARM       peak bytes of "private" or "plain"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.clipping import clipped_grad

from paired import GIB, explain, peak_of, time_rounds

Params = dict[str, jax.Array]
BUDGET = 40.0  # seconds of rounds per work: jax's private step is several times slower than its plain one


def dense(p: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return scaled * p[f"{name}.norm.weight"] + p[f"{name}.norm.bias"]


def attention(p: Params, name: str, x: jax.Array, heads: int) -> jax.Array:
    batch, tokens, width = x.shape
    q, k, v = jnp.moveaxis(dense(p, f"{name}.qkv", x).reshape(batch, tokens, 3, heads, width // heads), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return dense(p, f"{name}.out", mixed.reshape(x.shape))


def mlp(p: Params, name: str, x: jax.Array) -> jax.Array:
    return dense(p, f"{name}.down", jax.nn.gelu(dense(p, f"{name}.up", x), approximate=False))


def vit(p: Params, images: jax.Array) -> jax.Array:
    patches = images.reshape(-1, 3, 7, 4, 7, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 49, 48)
    x = dense(p, "patches", patches)
    x = jnp.concatenate([jnp.broadcast_to(p["first"], (len(x), 1, 192)), x], axis=1) + p["position"]
    for i in range(6):
        x = x + attention(p, f"{i}.attention", norm(p, f"{i}.a", x), heads=3)
        x = x + mlp(p, f"{i}.mlp", norm(p, f"{i}.b", x))
    return dense(p, "head", norm(p, "last", x)[:, 0])


def bert(p: Params, tokens: jax.Array) -> jax.Array:
    x = norm(p, "embedding", p["words"][tokens] + p["positions"][: tokens.shape[1]] + p["types"][0])
    for i in range(6):
        x = norm(p, f"{i}.a", x + attention(p, f"{i}.attention", x, heads=12))
        x = norm(p, f"{i}.b", x + mlp(p, f"{i}.mlp", x))
    return dense(p, "head", jnp.tanh(dense(p, "pooler", x[:, 0])))


def convnext(p: Params, images: jax.Array) -> jax.Array:
    conv = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = images.transpose(0, 2, 3, 1)
    for stage, width in enumerate((32, 64)):
        x = conv(x, p[f"{stage}.down.weight"], (2, 2), "VALID") + p[f"{stage}.down.bias"]
        for i in range(4):
            name = f"{stage}.{i}"
            y = conv(x, p[f"{name}.depthwise.weight"], (1, 1), "SAME", feature_group_count=width)
            y = mlp(p, name, norm(p, name, y + p[f"{name}.depthwise.bias"]))
            x = x + y * p[f"{name}.scale"]
    return dense(p, "head", norm(p, "last", x.mean((1, 2))))


def probe(p: Params, features: jax.Array) -> jax.Array:
    return dense(p, "head", features)


def dense_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.norm.weight": (width,), f"{name}.norm.bias": (width,)}


def block_shapes(i: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        **norm_shapes(f"{i}.a", width),
        **dense_shapes(f"{i}.attention.qkv", width, 3 * width),
        **dense_shapes(f"{i}.attention.out", width, width),
        **norm_shapes(f"{i}.b", width),
        **dense_shapes(f"{i}.mlp.up", width, 4 * width),
        **dense_shapes(f"{i}.mlp.down", 4 * width, width),
    }


def vit_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"first": (1, 1, 192), "position": (1, 50, 192), **dense_shapes("patches", 48, 192)}
    for i in range(6):
        shapes |= block_shapes(i, 192)
    return shapes | norm_shapes("last", 192) | dense_shapes("head", 192, 10)


def bert_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"words": (30522, 384), "positions": (512, 384), "types": (2, 384), **norm_shapes("embedding", 384)}
    for i in range(6):
        shapes |= block_shapes(i, 384)
    return shapes | dense_shapes("pooler", 384, 384) | dense_shapes("head", 384, 2)


def convnext_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for stage, (before, width) in enumerate(((1, 32), (32, 64))):
        shapes |= {f"{stage}.down.weight": (2, 2, before, width), f"{stage}.down.bias": (width,)}
        for i in range(4):
            name = f"{stage}.{i}"
            shapes |= {f"{name}.depthwise.weight": (5, 5, 1, width), f"{name}.depthwise.bias": (width,)}
            shapes |= norm_shapes(name, width) | {f"{name}.scale": (width,)}
            shapes |= dense_shapes(f"{name}.up", width, 2 * width) | dense_shapes(f"{name}.down", 2 * width, width)
    return shapes | norm_shapes("last", 64) | dense_shapes("head", 64, 10)


@dataclass(frozen=True)
class Work:
    net: Callable[[Params, jax.Array], jax.Array]
    shapes: dict[str, tuple[int, ...]]
    inputs: tuple[int, ...]  # rows first
    classes: int = 10
    entropy: bool = False  # test-time step: entropy loss, norms only
    unit_size: int = 1
    at_once: int | None = None


IMAGE = (3, 28, 28)
WORKS = {
    "vit-64": Work(vit, vit_shapes(), (64, *IMAGE)),
    "vit-256": Work(vit, vit_shapes(), (256, *IMAGE)),
    "convnext": Work(convnext, convnext_shapes(), (64, 1, 28, 28)),
    "bert": Work(bert, bert_shapes(), (8, 128), classes=2),
    "norms-8": Work(vit, vit_shapes(), (8, *IMAGE), entropy=True),
    "norms-64": Work(vit, vit_shapes(), (64, *IMAGE), entropy=True),
    "norms-256": Work(vit, vit_shapes(), (256, *IMAGE), entropy=True),
    "probe": Work(probe, dense_shapes("head", 768, 100), (50_000, 768), classes=100, at_once=5_000),
    "units": Work(vit, vit_shapes(), (256, *IMAGE), unit_size=8),
}


def initial(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> Params:
    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.weight"):
            return np.ones(shape)
        if name.endswith("bias"):
            return np.zeros(shape)
        return rng.normal(size=shape) * (0.02 if len(shape) < 2 else np.prod(shape[:-1]) ** -0.5)

    return {name: jnp.asarray(value(name, shape), jnp.float32) for name, shape in shapes.items()}


def build(work: Work) -> dict[str, Callable[[], object]]:
    """The private and the plain step; raises AssertionError when the private one is wrong on the first rows."""
    rng = np.random.default_rng(0)
    params = initial(work.shapes, rng)
    trained = {name: value for name, value in params.items() if not work.entropy or ".norm." in name}
    frozen = {name: value for name, value in params.items() if name not in trained}
    if work.net is bert:
        x = jnp.asarray(rng.integers(30522, size=work.inputs))
    else:
        x = jnp.asarray(rng.normal(size=work.inputs), jnp.float32)
    y = jnp.asarray(rng.integers(work.classes, size=work.inputs[0]))

    def loss(trained: Params, frozen: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(work.net({**trained, **frozen}, x))
        if work.entropy:
            return -(jnp.exp(scores) * scores).sum(-1).mean()
        return -jnp.take_along_axis(scores, y[:, None], axis=1).mean()

    gradient = jax.jit(jax.grad(loss))
    by_row = partial(clipped_grad, loss, batch_argnums=(2, 3))
    check(gradient, by_row, (trained, frozen), x[:8], y[:8])
    private = jax.jit(by_row(l2_clip_norm=1.0, microbatch_size=work.at_once))
    plain, units = gradient, (x, y)
    if work.unit_size > 1:
        plain = private
        private = jax.jit(by_row(l2_clip_norm=1.0, keep_batch_dim=False))
        units = tuple(column.reshape(-1, work.unit_size, *column.shape[1:]) for column in (x, y))
    return {
        "private": lambda: jax.block_until_ready(private(trained, frozen, *units)),
        "plain": lambda: jax.block_until_ready(plain(trained, frozen, x, y)),
    }


def check(gradient: Callable, by_row: Callable, fixed: tuple[Params, Params], x: jax.Array, y: jax.Array) -> None:
    """The clipped sum of a few rows equals the one from a gradient per row."""
    gradients = [gradient(*fixed, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    norms = [float(jnp.sqrt(sum(jnp.square(g).sum() for g in row.values()))) for row in gradients]
    clip = float(np.median(norms))
    found = jax.jit(by_row(l2_clip_norm=clip))(*fixed, x, y)
    for name in found:
        expected = sum(min(1.0, clip / size) * row[name] for size, row in zip(norms, gradients, strict=True))
        assert jnp.allclose(found[name], expected, rtol=1e-3, atol=1e-4 * clip), f"wrong sum for {name}"


def answer(name: str, what: str, argument: str) -> dict[str, object]:
    steps = build(WORKS[name])
    if what == "memory":
        steps[argument]()  # compile outside the measurement
        return {"memory": peak_of(steps[argument], 12 * GIB)}
    return dict(time_rounds(steps, rounds=int(argument), warmups=1, budget=BUDGET))


if __name__ == "__main__":
    try:
        print(json.dumps(answer(*sys.argv[1:])))
    except Exception as error:
        print(json.dumps({"note": explain(error)}))
