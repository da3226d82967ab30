"""``MODEL[:FUNCTION]`` -> the step to plan, its arguments and the options of its script; or the
loss to place."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.arguments.calls import bind
from planner.errors import MeshwrightError, ModelError, RequestError
from planner.frontend import capture
from planner.frontend.capture import CapturedCall
from planner.frontend.loss import Loss

OF_A_LOSS = ("example_params", "example_batch", "optimizer")
"""Names that a file defines beside a loss."""


@dataclass(frozen=True)
class Target:
    """A Python file, and the function in it that was named (None: find one)."""

    path: Path
    function: str | None
    arguments: tuple[str, ...] = ()
    """The entries of the file's ``sys.argv`` after the first."""

    def __str__(self) -> str:
        return str(self.path) + (f":{self.function}" if self.function else "")


def parse_target(text: str, arguments: Sequence[str] = ()) -> Target:
    """Split ``model.py:function``; raises RequestError when there is no such file.

    Args:
        text: the file, and optionally a function in it.
        arguments: command-line arguments of the file.
    """
    name, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        name, function = text, ""
    path = Path(name)
    if not path.is_file():
        what = "is a directory, not a Python file" if path.is_dir() else "no such file"
        raise RequestError(f"{name}: {what}; expected MODEL.py or MODEL.py:FUNCTION")
    return Target(path, function or None, tuple(arguments))


@contextlib.contextmanager
def user_environment(target: Target) -> Iterator[None]:
    """Set ``sys.path`` and ``sys.argv`` as the user's script expects; send its prints to stderr."""
    path, argv = list(sys.path), sys.argv
    sys.path.insert(0, str(target.path.resolve().parent))
    sys.argv = [str(target.path), *target.arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:], sys.argv = path, argv


def find_step(target: Target) -> CapturedCall:
    """Find the step that ``target`` means; runs the user's code inside ``user_environment``.

    Raises:
        RequestError: the file has nothing to plan; says what it lacks.
        ModelError: the user's code failed; ``__cause__`` is its exception.
    """
    if target.function is not None:
        return _named(target, target.function)
    names = module_names(target.path)
    if {"train_step", "example_args"} <= names:
        return _named(target, "train_step")
    if {"loss", *OF_A_LOSS} <= names:
        return _loss(target, _load(target), "loss").train_step()
    if _is_model(names) and "example_args" not in names:
        from planner.frontend.model_step import model_call

        module = _load(target)
        with user_code(f"building the model of {target.path}"):
            return model_call(module)
    return _captured(target)


def resolve_loss(target: Target) -> Loss:
    """Find the loss that ``target`` means; runs the user's code inside ``user_environment``.

    Raises:
        RequestError: the file has no loss; says what to define.
        ModelError: the user's code failed; ``__cause__`` is its exception.
    """
    names = module_names(target.path)
    name = target.function or "loss"
    missing = [x for x in (name, *OF_A_LOSS) if x not in names]
    if _is_model(names) and missing and target.function is None:
        from planner.frontend.model_step import model_loss

        module = _load(target)
        with user_code(f"building the model of {target.path}"):
            return model_loss(module)
    if missing:
        raise RequestError(
            f"{target}: placement needs to know what the parameters are, and a train step does not "
            f"say it; define {name}(params, *batch), a scalar; example_params() and "
            "example_batch(), arrays or ShapeDtypeStructs; and optimizer, an optax transformation "
            f"(the file lacks {', '.join(missing)}); or a Flax model (model, or make_model()) and "
            "example_inputs()"
        )
    return _loss(target, _load(target), name)


def _is_model(names: set[str]) -> bool:
    return "example_inputs" in names and bool(names & {"model", "make_model"})


def _loss(target: Target, module: ModuleType, name: str) -> Loss:
    function, optimizer = getattr(module, name), module.optimizer
    for given, what in ((function, name), *((getattr(module, x), x) for x in OF_A_LOSS[:2])):
        if not callable(given):
            raise RequestError(f"{target.path}: {what} is a {type(given).__name__}, not a function")
    if not is_optimizer(optimizer):
        raise RequestError(
            f"{target.path}: optimizer is a {type(optimizer).__name__}; expected an optax "
            "transformation, such as optax.adagrad(0.1)"
        )
    with user_code(f"example_params() of {target.path}"):
        params = module.example_params()
    with user_code(f"example_batch() of {target.path}"):
        batch = module.example_batch()
    if not isinstance(batch, tuple | list):
        raise RequestError(
            f"{target.path}: example_batch() must return the tuple of what {name} takes after the "
            f"parameters, got {type(batch).__name__}"
        )
    return Loss(function, params, tuple(batch), optimizer)


def is_optimizer(given: Any) -> bool:
    """Whether ``given`` is an optax transformation."""
    return callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))


def module_names(path: Path) -> set[str]:
    """Names that a file defines at module level, found without running it.

    Raises:
        ModelError: the file is not Python.
    """
    with user_code(f"reading {path}"):
        tree = ast.parse(path.read_bytes(), str(path))
    names: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If) and "__main__" not in ast.dump(node.test):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.With | ast.Try):
            pending += node.body
    return names


@contextlib.contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turn exceptions of the user's code into ModelError; our own errors pass through."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(f"{doing} failed") from error
    except SystemExit as error:
        raise ModelError(f"{doing} ended the program") from error


def _load(target: Target) -> ModuleType:
    """Run the file as a module named after its stem (another name if that one is taken)."""
    path = target.path.resolve()
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_inspected"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"{target.path}: not a Python file; expected MODEL.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(f"loading {target.path}"):
        spec.loader.exec_module(module)
    return module


def _named(target: Target, name: str) -> CapturedCall:
    module = _load(target)
    function = getattr(module, name, None)
    if function is None:
        functions = sorted(
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        raise RequestError(
            f"{target.path} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        )
    if not hasattr(module, "example_args") and all(hasattr(module, x) for x in OF_A_LOSS):
        return _loss(target, module, name).train_step()
    if not callable(function):
        raise RequestError(f"{target.path}: {name} is a {type(function).__name__}, not a function")
    return _call(target, function, getattr(module, "example_args", None))


def _call(target: Target, function: Any, example_args: Any) -> CapturedCall:
    if not callable(example_args):
        raise RequestError(
            f"{target.path} has no example_args(); define one that returns the tuple of arguments "
            f"of {getattr(function, '__name__', 'the step')} (arrays or ShapeDtypeStructs)"
        )
    with user_code(f"example_args() of {target.path}"):
        args = example_args()
    if not isinstance(args, tuple | list):
        raise RequestError(
            f"{target.path}: example_args() must return the tuple of the step's arguments, got "
            f"{type(args).__name__}"
        )
    with user_code(f"preparing the step of {target.path}"):
        call = capture.call_of(function, args)
    if call is not None:  # parallelized already: plan what it wraps, with its options
        return call
    bound = bind(function, args)
    return CapturedCall(bound.function, bound.args, {})


def _captured(target: Target) -> CapturedCall:
    """Run the file as a script up to its first call of a parallelized function."""
    try:
        with capture.capturing(), user_code(f"running {target.path}"):
            try:
                namespace = runpy.run_path(os.fspath(target.path), run_name="__main__")
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
                namespace = {}
    except capture.Captured as captured:
        return captured.call
    if callable(namespace.get("train_step")) and callable(namespace.get("example_args")):
        return _call(target, namespace["train_step"], namespace["example_args"])
    raise RequestError(
        f"{target.path} never called a parallelized function; name one: {target.path}:function "
        "(with example_args() beside it), or define model and example_inputs(), or loss(params, "
        "*batch), example_params(), example_batch() and optimizer"
    )
