"""The public names of meshwright in one import: ``import meshwright as mw``.

A name is imported from ``planner`` or ``executor`` when it is first used, so the import itself
takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor import (
        Batches,
        Checkpoints,
        CompiledStep,
        NotFiniteError,
        Parallelized,
        PreemptedError,
        ProcessMismatchError,
        Trained,
        check,
        compile_plan,
        detect_cluster,
        init,
        initialize,
        mean_metrics,
        parallelize,
        train,
        train_options,
    )
    from meshwright.inspection import inspect
    from planner import (
        MODES,
        MemoryLimitError,
        MeshSpec,
        MeshwrightError,
        ModelError,
        ParallelMode,
        PinError,
        Plan,
        PlanFormatError,
        PlanMismatchError,
        RequestError,
        Sharding,
        StoredAs,
        get_parallel_mode,
        load_plan,
        make_plan,
        register_rule,
        set_parallel_mode,
        shard,
        with_logical_axis_rules,
    )

    __version__: str

__all__ = [
    "MODES",
    "Batches",
    "Checkpoints",
    "CompiledStep",
    "MemoryLimitError",
    "MeshSpec",
    "MeshwrightError",
    "ModelError",
    "NotFiniteError",
    "ParallelMode",
    "Parallelized",
    "PinError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "PreemptedError",
    "ProcessMismatchError",
    "RequestError",
    "Sharding",
    "StoredAs",
    "Trained",
    "__version__",
    "check",
    "compile_plan",
    "detect_cluster",
    "get_parallel_mode",
    "init",
    "initialize",
    "inspect",
    "load_plan",
    "make_plan",
    "mean_metrics",
    "parallelize",
    "register_rule",
    "set_parallel_mode",
    "shard",
    "train",
    "train_options",
    "with_logical_axis_rules",
]

_OF_EXECUTOR = frozenset(
    "Batches Checkpoints CompiledStep NotFiniteError Parallelized PreemptedError "
    "ProcessMismatchError Trained check compile_plan detect_cluster init initialize "
    "mean_metrics parallelize train train_options".split()
)


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        AttributeError: there is no such name.
        ImportError: another distribution's ``planner`` or ``executor`` hides meshwright's; the
            message says where it is.
    """
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("meshwright")
    elif name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        home = "executor" if name in _OF_EXECUTOR else "planner"
        value = _own("meshwright.inspection" if name == "inspect" else home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*globals(), *__all__})


def _own(home: str, name: str) -> Any:
    """A name from one of meshwright's modules, never from another distribution's."""
    from meshwright.packages import check_packages

    check_packages()
    module = importlib.import_module(home)
    if not hasattr(module, name):
        raise ImportError(
            f"{module.__file__} has no {name}: another distribution has a package of that name "
            "and has written over meshwright's; install meshwright into an environment of its own",
            name=home,
            path=module.__file__,
        )
    return getattr(module, name)
