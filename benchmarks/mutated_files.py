"""What damaged input files do: every one must end in an answer, or in one line with exit code 2.

Five kinds of files are damaged at random, with a seed: saved plans, cluster files, problems (plain
and gzipped), host files, and a CustomResourceDefinition for ``planner launch --schema``. Each is
given to the commands that read it, in this process. Counted are: tracebacks, answers that took
longer than ``LIMIT_S``, refusals of more than one line, and anything outside the given paths that
a command wrote, removed, started or connected to (seen by an audit hook, and by comparing a folder
beside the input before and after).

    python benchmarks/mutated_files.py --cases 1000
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from executor.cli import main as cli  # noqa: E402
from executor.launch.hosts import hostfile, mpi, ssh  # noqa: E402
from executor.launch.kubernetes import jobset  # noqa: E402
from planner.errors import RequestError  # noqa: E402

LIMIT_S = 60
SEVERAL_LINES = "fits"
"""In the first line of the one refusal that has more: no plan fits into memory, and what helps."""
REFUSED = 2

STEP = """
import jax, jax.numpy as jnp

def train_step(w, x):
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)
    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

def example_args():
    s = lambda *n: jax.ShapeDtypeStruct(n, jnp.float32)
    return {"a": s(64, 1024), "b": s(1024, 64)}, s(8192, 64)
"""
CLUSTERS = (
    b'[cluster]\ndevice = "h100"\ndevices_per_node = 4\nnodes = 2\n\n[device]\n'
    b"memory_bytes = 80_000_000_000\n\n[intra_node]\nbytes_per_s = 4.5e11\nwires = []\n",
    b'[cluster]\ndevice = "v5p"\nshape = [2, 2, 2]\nslices = 1\n\n[torus]\nlatency_s = 1e-6\n',
)
HOSTS = (
    b"# hosts\nnode0 slots=2  # fast\n\nnode1 slots=4\n10.0.0.7\n",
    b"node0\nuser@node1 port=2222\n10.0.0.7 slots=4 user=ann\n",
)
EXTREMES = (
    *("-1", "0", "1", "1.5", "-0.0", "1e400", "-1e400", "1e308", "NaN", "Infinity", "true", "null"),
    *("1" + "0" * 400, "9" * 5000, '"x"', "[]", "{}", "[" * 50_000 + "]" * 50_000, "1000000000"),
    *(str(2**63), str(2**31), '"\\ud800"', '"\\u0000"', '"\\u001b[31m"', '"\\u2028"', '""'),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 10**9, 2**63, 10**400, 1.5, 1e308, "", "x", "data", "\ud800"),
    *("\x00", "\x1b[31m", "\u2028", '"""', "a" * 10_000, [], {}, [[]], [None], [1], {"a": 1}),
)


@dataclass
class Outcome:
    """What became of the cases of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Cases that ended neither in an answer nor in one line with exit code 2."""
        return len(self.failures)


# ---- damage ------------------------------------------------------------------------------


def damaged(rng: random.Random, text: bytes) -> bytes:
    """One to three random changes of a text."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = rng.choice(DAMAGES)(rng, text)
    return text


def _slice(rng: random.Random, text: bytes) -> tuple[int, int]:
    start = rng.randrange(len(text) + 1)
    return start, min(len(text), start + rng.choice((1, 2, 8, 64)))


def _flip(rng: random.Random, text: bytes) -> bytes:
    if not text:
        return text
    at = rng.randrange(len(text))
    return text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :]


def _drop(rng: random.Random, text: bytes) -> bytes:
    start, end = _slice(rng, text)
    return text[:start] + text[end:]


def _repeat(rng: random.Random, text: bytes) -> bytes:
    start, end = _slice(rng, text)
    return text[:end] + text[start:end] * rng.choice((1, 3, 100)) + text[end:]


def _insert(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.randbytes(rng.choice((1, 4, 32))) + text[at:]


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def _number(rng: random.Random, text: bytes) -> bytes:
    """Replaces a number or a quoted word by something else."""
    found = list(re.finditer(rb'-?\d[\d_.e+-]*|"[^"\n]*"', text))
    if not found:
        return text
    at = rng.choice(found)
    return text[: at.start()] + rng.choice(EXTREMES).encode() + text[at.end() :]


def _lines(rng: random.Random, text: bytes) -> bytes:
    lines = text.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        rng.shuffle(lines)
    else:
        lines[at] += b" " + rng.choice(lines)
    return b"\n".join(lines)


def _encoding(rng: random.Random, text: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return b"\xef\xbb\xbf" + text
    if kind == 1:
        return text.decode("latin-1").encode("utf-16")
    return text.replace(b"\n", b"\r") if kind == 2 else text + b"\x00"


def _node(rng: random.Random, text: bytes) -> bytes:
    """Replaces, drops, renames or doubles a random part of a JSON text."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _flip(rng, text)
    places: list[tuple[Any, Any]] = []
    pending = [whole]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list) and len(part):
            keys = list(part) if isinstance(part, dict) else list(range(len(part)))
            places += [(part, key) for key in keys[:200]]
            pending += [part[key] for key in keys[:200]]
    if not places:
        return text
    part, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, dict):
        part[rng.choice(("x", "", "data", "\u2028"))] = part.pop(key)
    elif kind == 2 and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = rng.choice(VALUES)
    return json.dumps(whole).encode()


DAMAGES = (_flip, _drop, _repeat, _insert, _cut, _number, _number, _lines, _encoding, _node, _node)


def put(rng: random.Random, path: Path, text: bytes) -> None:
    """Write a damaged file; now and then something that is no regular file stands there."""
    kind = rng.randrange(40)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        pass
    else:
        body = damaged(rng, text)
        if path.suffix == ".gz":
            body = damaged(rng, gzip.compress(text)) if rng.random() < 0.5 else gzip.compress(body)
        path.write_bytes(body)


def take_away(path: Path) -> None:
    """Remove what ``put`` left."""
    if path.is_symlink() or path.exists():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# ---- what reads the files ----------------------------------------------------------------


def read_plan(path: Path, out: Path, seeds: dict[str, Any]) -> Iterator[list[str]]:
    """Commands that take a plan."""
    del seeds
    good = str(path.parent / "good.json")
    yield ["compare", "--plan", good, str(path), "--json"]
    yield ["compare", "--plan", str(path), good]
    for form in ("python", "partition-specs", "logical-rules"):
        yield ["export", str(path), "--as", form, "--out", str(out / "sharded.py")]


def read_cluster(path: Path, out: Path, seeds: dict[str, Any]) -> Iterator[list[str]]:
    """Commands that take a cluster file."""
    del out, seeds
    step = str(path.parent / "step.py")
    yield ["inspect", step, "--cluster", str(path), "--mesh", "data=8"]
    yield ["inspect", step, "--profile", str(path), "--mode", "STAND_ALONE"]


def read_problem(path: Path, out: Path, seeds: dict[str, Any]) -> Iterator[list[str]]:
    """The command that takes a problem."""
    del seeds
    yield ["search", str(path), "--time-limit", "1", "--out", str(out / "choice.json")]


def read_schema(path: Path, out: Path, seeds: dict[str, Any]) -> Iterator[list[str]]:
    """The command that takes a CustomResourceDefinition."""
    del seeds
    words = ["launch", "--launcher", "k8s", "--image", "i", "-n", "2", "--out", str(out / "j.yaml")]
    yield [*words, "--schema", str(path), "step.py"]


def use_hosts(path: Path) -> int:
    """What launchers make of a host file, up to the words that they would run."""
    try:
        hosts = hostfile.read_hosts(path)
        for host in hosts:
            words = ssh.connection(host, ())
            if host.user is not None and host.user.startswith("-"):
                raise AssertionError(f"an option of ssh came from a host file: {words}")
        if not any(host.user or host.port for host in hosts):
            mpi.where(hosts, 8)
    except RequestError as error:
        print(f"planner: error: {error}", file=sys.stderr)
        return REFUSED
    return 0


Reader = Callable[[Path, Path, dict[str, Any]], Iterator[list[str]]]
READERS: dict[str, tuple[str, Reader | None]] = {
    "plan": (".json", read_plan),
    "cluster": (".toml", read_cluster),
    "problem": (".json", read_problem),
    "hosts": (".txt", None),
    "schema": (".yaml", read_schema),
}


def seeds_in(folder: Path) -> dict[str, list[bytes]]:
    """Undamaged files of every kind; a good plan and the step are left in the folder."""
    step = folder / "step.py"
    step.write_text(STEP)
    plan, problem = folder / "good.json", folder / "good_problem.json"
    words = ["inspect", str(step), "--cluster", "cpu:8", "--mesh", "data=8", "--save", str(plan)]
    with contextlib.redirect_stdout(io.StringIO()):
        if cli.main([*words, "--dump-problem", str(problem)]):
            raise SystemExit("the undamaged step could not be planned")
    version = {"name": "v1alpha2", "schema": {"openAPIV3Schema": jobset.SCHEMA}}
    crd = {"kind": "CustomResourceDefinition", "spec": {"versions": [version]}}
    return {
        "plan": [plan.read_bytes()],
        "cluster": list(CLUSTERS),
        "problem": [problem.read_bytes()],
        "hosts": list(HOSTS),
        "schema": [json.dumps(crd, indent=1).encode()],
    }


# ---- running -----------------------------------------------------------------------------


class TookTooLongError(BaseException):
    """A command ran longer than LIMIT_S."""


_watching: list[Path] = []
_touched: list[str] = []
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
        return
    if event == "open" or event in _CHANGES:
        path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
        inside = path and Path(os.path.abspath(path)).is_relative_to(_watching[0])
        cache = "__pycache__" in Path(path).parts  # of Python and numba, beside their sources
        if path and path != os.devnull and not inside and not cache:
            _touched.append(f"{event} {path}")
    elif event in _STARTS or event == "socket.connect":
        _touched.append(f"{event} {args[0]!r}")


@contextlib.contextmanager
def _watched(allowed: Path) -> Iterator[None]:
    """Only ``allowed`` may be changed; what else is goes into ``_touched``."""
    if not getattr(sys, "_mutated_files_audit", False):
        sys.addaudithook(_audit)
        sys._mutated_files_audit = True  # type: ignore[attr-defined]
    _touched.clear()
    _watching.append(allowed)
    try:
        yield
    finally:
        _watching.pop()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(call: Callable[[], int]) -> tuple[str, str]:
    """How a call ended: ("answer" | "refused" | what is wrong, details)."""
    out, err = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    try:
        with _limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call()
        out.getvalue().encode()
    except TookTooLongError:
        return "too long", ""
    except BaseException:
        return "traceback", traceback.format_exc()
    said = err.buffer.getvalue().decode()
    if "Traceback" in said:
        return "traceback", said
    if code != REFUSED:
        return ("answer", "") if code in (0, 4) else (f"exit code {code}", said)
    lines = said.splitlines()
    short = len(lines) == 1 and len(said) < 2000
    if short or (lines and SEVERAL_LINES in lines[0]):
        return "refused", said
    return "not one line", said


def cases(kind: str, count: int, seed: int, folder: Path) -> Outcome:
    """Damage ``count`` files of a kind and give each to what reads it."""
    given, out, beside = folder / "given", folder / "out", folder / "beside"
    for made in (given, out, beside):
        made.mkdir(exist_ok=True)
    seeds = seeds_in(given)
    canary = beside / "canary"
    canary.write_text("untouched")
    suffix, reader = READERS[kind]
    rng, outcome = random.Random(f"{kind} {seed}"), Outcome()
    for number in range(count):
        ending = rng.choice((suffix, suffix + ".gz")) if kind == "problem" else suffix
        path = given / f"case{ending}"
        put(rng, path, rng.choice(seeds[kind]))
        calls: list[tuple[str, Callable[[], int]]] = []
        if reader is None:
            calls.append(("hosts", lambda path=path: use_hosts(path)))  # type: ignore[misc]
        else:
            every = list(reader(path, out, {}))
            for words in every if count > 200 else rng.sample(every, 1):
                calls.append((words[0], lambda words=words: cli.main(words)))  # type: ignore[misc]
        worst = "refused"
        for name, call in calls:
            with _watched(out):
                how, details = ended(call)
            if _touched or [*beside.iterdir()] != [canary] or canary.read_text() != "untouched":
                how, details = "touched", f"{_touched} {details}"
            if how not in ("answer", "refused"):
                worst = how
                last = details.strip().splitlines()[-1:] or [""]
                outcome.failures.append(f"{kind} {seed}:{number} {name}: {how}: {last[0][:300]}")
                break
            worst = "answer" if how == "answer" else worst
        outcome.counts[worst] += 1
        take_away(path)
    return outcome


def main() -> None:
    """Run all kinds and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(READERS), action="append")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="failures to print")
    options = parser.parse_args()
    bad = 0
    for kind in options.kind or READERS:
        with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
            outcome = cases(kind, options.cases, options.seed, Path(folder))
        counts = ", ".join(f"{n} {how}" for how, n in outcome.counts.most_common())
        print(f"{kind}: {options.cases} files: {counts}", flush=True)
        for line in outcome.failures[: options.show]:
            print(f"  {line}")
        bad += outcome.bad
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
