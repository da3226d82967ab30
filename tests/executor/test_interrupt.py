"""Ctrl-C ends ``planner`` with 130 and one line, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOW = "now, please"
SLEEP = f"print({NOW!r}, file=sys.stderr, flush=True); time.sleep(100)"
STEP = """
import atexit, sys, time
import jax, jax.numpy as jnp

class Slow:
    def __del__(self):
        {inside}

def example_args():
    {arguments}
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)

def train_step(w, x):
    {step}
    for _ in range(80):
        x = jnp.tanh(x @ w)
    {after}
    return w, x.sum()

{body}
"""


def interrupted(words: list[str], moment: str, *flags: str) -> tuple[int, str]:
    """Exit code and stderr of the command, which gets SIGINT as soon as stderr has ``moment``."""
    process = subprocess.Popen(
        [sys.executable, *flags, "-m", "planner_command", *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if moment in line:
                process.send_signal(signal.SIGINT)
                break
        else:
            raise AssertionError(f"{moment!r} never came: {''.join(said)}")
        return process.wait(60), "".join(said) + process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize("module", ["numpy", "jax.numpy", "planner.graph.ir"])
def test_while_modules_are_imported(module: str) -> None:
    code, said = interrupted(["inspect", "none.py"], f" {module}\n", "-X", "importtime")
    assert code == 130 and "Traceback" not in said
    assert said.endswith("planner: interrupted\n")


MOMENTS = {
    "the script is read": {"body": SLEEP},
    "its arguments are made": {"arguments": SLEEP},
    "the step is traced": {"step": SLEEP},
    "the step is planned": {"after": f"print({NOW!r}, file=sys.stderr, flush=True)"},
    "a text is executed": {"body": f"exec({SLEEP!r})"},
    "the program ends": {"body": f"atexit.register(lambda: ({SLEEP.replace('; ', ', ')}))"},
    "what a destructor raises is dropped": {"inside": SLEEP, "body": "Slow()"},
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_while(moment: str, tmp_path: Path) -> None:
    parts = dict.fromkeys(("inside", "arguments", "step", "after"), "pass") | {"body": ""}
    script = tmp_path / "script.py"
    script.write_text(STEP.format(**(parts | MOMENTS[moment])))
    words = ["inspect", str(script), "--cluster", "h100:8", "--save", str(tmp_path / "plan.json")]
    code, said = interrupted(words, NOW)
    assert code == 130 and "Traceback" not in said and "Exception ignored" not in said
    assert said.strip().splitlines()[-1] == "planner: interrupted"
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []
