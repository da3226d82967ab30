"""Handwritten digits on parameter servers: workers that need not keep step.

A small Flax network on scikit-learn's digits. In mode "sync" the servers update once all workers
have pushed; in "ssp" a worker may be some pushes ahead of the slowest; in "async" it never waits.

    python examples/mnist_like_async.py --workers 3 --mode ssp --staleness 4
"""

import argparse
import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from executor.parameter_server import ParameterServer, Served, train

BATCH = 32
STEP_S = 0.01  # a gradient takes so long, as on larger networks; this one alone would be too quick
RATE = 1e-3
Data = dict[str, Any]


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def prepare(seed: int = 0) -> tuple[Data, Data]:
    """Four fifths of the digits to train on, one to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    x, y = (digits.data / 16).astype(np.float32)[order], digits.target[order]
    cut = len(y) * 4 // 5
    return {"x": x[:cut], "y": y[:cut]}, {"x": x[cut:], "y": y[cut:]}


def fresh() -> Any:
    """Parameters to begin with."""
    return Net().init(jax.random.key(0), jnp.zeros((1, 64)))


def loss(params: Any, data: Data) -> Any:
    """Mean cross-entropy."""
    logits = Net().apply(params, data["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, data["y"]).mean()


gradient = jax.jit(jax.grad(loss))


def accuracy(params: Any, data: Data) -> float:
    """Share of the digits that are recognised."""
    return float((Net().apply(params, data["x"]).argmax(1) == data["y"]).mean())


def per_epoch(data: Data, workers: int) -> int:
    """A worker's batches of an epoch."""
    return len(data["y"]) // workers // BATCH


def batch(data: Data, rank: int, workers: int, number: int) -> Data:
    """A worker's batch of this number; its share of the digits, in another order each epoch."""
    epoch, at = divmod(number, per_epoch(data, workers))
    own = np.arange(rank, len(data["y"]), workers)
    rows = np.random.default_rng((rank, epoch)).permutation(own)[at * BATCH : (at + 1) * BATCH]
    return {name: x[rows] for name, x in data.items()}


def loop(server: ParameterServer, data: Data, epochs: int, slow: float) -> int:
    """A worker; worker 0 makes so many epochs, the others go on until it has. The last one takes
    `slow` times as long for a gradient. Returns the worker's steps."""
    params = server.init(fresh())
    gradient(params, batch(data, server.rank, server.num_workers, 0))  # compiled
    server.barrier()
    step_s = STEP_S * (slow if server.rank == server.num_workers - 1 else 1.0)
    number, last = 0, epochs * per_epoch(data, server.num_workers)
    while number < last if server.is_chief else 0 in server.members():
        start = time.perf_counter()
        found = gradient(params, batch(data, server.rank, server.num_workers, number))
        found = jax.device_get(found)
        time.sleep(max(0.0, start + step_s - time.perf_counter()))
        params = server.push_pull(found)
        number += 1
    return number


def run(data: Data, epochs: int, slow: float = 1.0, **options: Any) -> Served:
    """Train; `options` are those of `train`."""
    given = functools.partial(loop, data=data, epochs=epochs, slow=slow)
    return train(given, optimizer=optax.adam(RATE), **options)


def main() -> None:
    """Train, and print every worker's epochs and the accuracy on test digits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told = os.environ.get  # by `planner launch`, where that runs this
    parser.add_argument("--workers", type=int, default=told("MESHWRIGHT_PS_WORKERS", 3))
    parser.add_argument("--servers", type=int, default=told("MESHWRIGHT_PS_SERVERS", 1))
    parser.add_argument("--mode", default="async", choices=("sync", "ssp", "async"))
    parser.add_argument("--staleness", type=int, default=4, help="for ssp")
    backend = told("MESHWRIGHT_PS_BACKEND", "local")
    parser.add_argument("--backend", default=backend, choices=("local", "ray"))
    parser.add_argument("--epochs", type=int, default=20, help="of worker 0")
    parser.add_argument(
        "--slow", type=float, default=3.0, help="of the last worker, by this factor"
    )
    args = parser.parse_args()

    data, test = prepare()
    if not per_epoch(data, max(1, args.workers)):
        most = len(data["y"]) // BATCH
        parser.error(
            f"--workers {args.workers}: a worker's share of the {len(data['y'])} digits is less "
            f"than a batch of {BATCH}; at most {most}"
        )
    done = run(
        data,
        args.epochs,
        args.slow,
        workers=args.workers,
        servers=args.servers,
        mode=args.mode,
        backend=args.backend,
        **({"staleness": args.staleness} if args.mode == "ssp" else {}),
    )
    for rank, steps in enumerate(done.returned):
        print(f"worker {rank}: {steps / per_epoch(data, args.workers):.1f} epochs")
    print(f"lags {dict(sorted(done.counts[0].lags.items()))}")
    print(f"test accuracy {accuracy(done.params, test):.3f}")


if __name__ == "__main__":
    main()
