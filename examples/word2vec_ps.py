"""Word vectors on parameter servers: workers pull and push the rows of their words alone.

Skip-gram with negative sampling (Mikolov et al., Distributed representations of words and phrases
and their compositionality, NIPS 2013) on text that comes with Python: the language reference of
`pydoc_data.topics` and the docstrings of the standard library.

    python examples/word2vec_ps.py --workers 4 --servers 2 --mode async
"""

import argparse
import ast
import collections
import functools
import os
import re
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from executor.parameter_server import ParameterServer, Served, train

WIDTH, WINDOW, NEGATIVES, BATCH = 64, 4, 6, 512
LEAST, OFTEN = 5, 3e-4  # a word occurs at least so often; words of a greater share are thinned out
RATE = 0.15
SHOWN = ("raise", "month", "socket", "directory", "float", "string", "class", "list")


@dataclass(frozen=True)
class Data:
    """Pairs of words that stand close together.

    Attributes:
        words: the vocabulary, the most frequent first.
        pairs: [n, 2] word and neighbour, in random order.
        held: [m, 2] pairs of sentences that are left out of training.
        noise: [words] distribution function of what is drawn as no neighbour.
    """

    words: tuple[str, ...]
    pairs: Any
    held: Any
    noise: Any


def sentences() -> list[list[str]]:
    """The text, as words, paragraph by paragraph."""
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        named = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts += [ast.get_docstring(x) or "" for x in ast.walk(tree) if isinstance(x, named)]
    paragraphs = [p for text in texts for p in re.split(r"\n\s*\n", text)]
    return [re.findall(r"[a-z]+", p.lower()) for p in paragraphs]


def prepare(seed: int = 0) -> Data:
    """Pairs from the text; one paragraph in twenty is held out."""
    draw = np.random.default_rng(seed)
    text = sentences()
    counts = collections.Counter(w for s in text for w in s)
    words = [w for w, n in counts.most_common() if n >= LEAST]
    number = {w: k for k, w in enumerate(words)}
    often = np.array([counts[w] for w in words], float)
    keep = np.minimum(1, np.sqrt(OFTEN / (often / often.sum())))
    found: tuple[list[Any], list[Any]] = ([], [])
    for k, sentence in enumerate(text):
        ids = np.array([number[w] for w in sentence if w in number], np.int32)
        ids = ids[draw.random(len(ids)) < keep[ids]]
        for apart in range(1, WINDOW + 1):
            near = np.stack([ids[apart:], ids[:-apart]], 1) if len(ids) > apart else ids[:0, None]
            if near.size:
                found[k % 20 == 0].extend((near, near[:, ::-1]))
    pairs, held = (draw.permutation(np.concatenate(x)) for x in found)
    noise = np.cumsum(often**0.75)
    return Data(tuple(words), pairs, held[:4096], noise / noise[-1])


@jax.jit
def loss_and_gradients(word: Any, others: Any) -> Any:
    """Of word vectors [n, WIDTH], and of their neighbour's and those of no neighbours
    [n, 1 + NEGATIVES, WIDTH]: the mean loss, and gradients of the sum."""

    def loss(word: Any, others: Any) -> Any:
        scores = jnp.einsum("nw,nkw->nk", word, others)
        signs = jnp.ones(scores.shape[1]).at[0].set(-1.0)
        return jnp.sum(jax.nn.softplus(signs * scores))

    total, gradients = jax.value_and_grad(loss, argnums=(0, 1))(word, others)
    return total / len(word), gradients


def drawn(data: Data, pairs: Any, draw: Any) -> Any:
    """Every pair's word, [n], and its neighbour with words that are none, [n, 1 + NEGATIVES]."""
    noise = np.searchsorted(data.noise, draw.random((len(pairs), NEGATIVES)))
    return pairs[:, 0], np.concatenate([pairs[:, 1:], noise], 1)


def fresh(words: int) -> dict[str, Any]:
    """Tables to begin with: vectors of words, and of words as neighbours."""
    draw = np.random.default_rng(0)
    first = draw.uniform(-0.5, 0.5, (words, WIDTH)) / WIDTH
    return {"word": first.astype(np.float32), "other": np.zeros((words, WIDTH), np.float32)}


def held_loss(data: Data, rows: Any) -> float:
    """Loss on the held-out pairs; `rows` gives rows of the tables, as `pull_rows` does."""
    word, others = drawn(data, data.held, np.random.default_rng(1))
    got = rows({"word": word, "other": others.ravel()})
    return float(loss_and_gradients(got["word"], got["other"].reshape(*others.shape, WIDTH))[0])


def pull(server: ParameterServer, word: Any, others: Any) -> tuple[Any, Any]:
    """The vectors of a batch."""
    rows = server.pull_rows({"word": word, "other": others.ravel()})
    return rows["word"], rows["other"].reshape(*others.shape, WIDTH)


def push(server: ParameterServer, word: Any, others: Any, vectors: tuple[Any, Any]) -> None:
    """Gradients of a batch, by the rows that it read."""
    _, (to_word, to_others) = loss_and_gradients(*vectors)
    flat = np.asarray(to_others).reshape(-1, WIDTH)
    server.push(None, rows={"word": (word, to_word), "other": (others.ravel(), flat)})


def batch(data: Data, rank: int, workers: int, number: int) -> tuple[Any, Any]:
    """A worker's batch of this number: its words, and their neighbours and no neighbours."""
    own = data.pairs[rank::workers]
    at = number * BATCH % (len(own) - BATCH)
    return drawn(data, own[at : at + BATCH], np.random.default_rng((rank, number)))


def loop(server: ParameterServer, data: Data, steps: int, show: int) -> float:
    """A worker: its share of the pairs. Returns the seconds of its steps."""
    server.init({}, tables=fresh(len(data.words)))
    begun = time.perf_counter()
    for number in range(steps):
        words = batch(data, server.rank, server.num_workers, number)
        push(server, *words, pull(server, *words))
        if server.is_chief and show and number % show == show - 1:
            print(f"step {number + 1}: held-out loss {held_loss(data, server.pull_rows):.4f}")
    return time.perf_counter() - begun


def of_tables(tables: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
    """Rows of whole tables, as `pull_rows` gives them."""
    return {name: tables[name][rows] for name, rows in ids.items()}


def nearest(data: Data, tables: dict[str, Any], word: str, count: int = 5) -> list[str]:
    """Of the 1,200 most frequent words those whose vectors point most nearly as this one's does."""
    vectors = tables["word"] / np.linalg.norm(tables["word"], axis=1, keepdims=True)
    order = np.argsort(-(vectors[:1200] @ vectors[data.words.index(word)]))
    return [data.words[k] for k in order[1 : count + 1]]


def run(data: Data, steps: int, show: int = 0, **options: Any) -> Served:
    """Train; `options` are those of `train`."""
    given = functools.partial(loop, data=data, steps=steps, show=show)
    return train(given, optimizer=optax.adagrad(RATE), **options)


def main() -> None:
    """Train, and print the loss, updates per second and neighbours of some words."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told = os.environ.get  # by `planner launch`, where that runs this
    parser.add_argument("--workers", type=int, default=told("MESHWRIGHT_PS_WORKERS", 4))
    parser.add_argument("--servers", type=int, default=told("MESHWRIGHT_PS_SERVERS", 2))
    parser.add_argument("--mode", default="async", choices=("sync", "ssp", "async"))
    parser.add_argument("--staleness", type=int, default=4, help="for ssp")
    backend = told("MESHWRIGHT_PS_BACKEND", "local")
    parser.add_argument("--backend", default=backend, choices=("local", "ray"))
    parser.add_argument("--steps", type=int, default=300, help="of every worker")
    args = parser.parse_args()

    data = prepare()
    print(f"{len(data.words)} words, {len(data.pairs)} pairs, {len(data.held)} held out")
    before = held_loss(data, functools.partial(of_tables, fresh(len(data.words))))
    print(f"before: held-out loss {before:.4f}")
    options = {"staleness": args.staleness} if args.mode == "ssp" else {}
    done = run(
        data,
        args.steps,
        show=max(1, args.steps // 5),
        workers=args.workers,
        servers=args.servers,
        mode=args.mode,
        backend=args.backend,
        **options,
    )
    seconds = max(done.returned)
    counts = done.counts[0]
    print(f"after: held-out loss {held_loss(data, functools.partial(of_tables, done.tables)):.4f}")
    print(f"{counts.applied} pushes, {counts.applied / seconds:.0f} a second")
    for word in SHOWN:
        print(f"{word}: {', '.join(nearest(data, done.tables, word))}")


if __name__ == "__main__":
    main()
