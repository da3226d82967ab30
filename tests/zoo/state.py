"""State and results of odd kinds: side outputs, None, scalars, static parts, keys in the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

from tests.zoo.dense import batch_of, mlp, mlp_params, squares
from tests.zoo.program import EPS, dense, integers, normal, program


@program()
def side_outputs():
    """Metrics as a nested tree, an activation, a constant, None, Python scalars."""

    def step(params, batch):
        def loss_fn(params):
            hidden = jnp.tanh(batch["x"] @ params["up"]["w"])
            loss = squares(params, batch)
            return loss, {"hidden": hidden, "norms": [jnp.linalg.norm(hidden), None], "three": 3}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return grads, loss, aux, None, 0.5, True, jnp.arange(4), np.float32(2)

    return step, (mlp_params(), batch_of())


@program()
def results_twice_and_untouched():
    """The same value twice, an argument as it came, an argument nobody reads."""

    def step(w, x, unused, flag):
        y = x @ w
        return y, y, w, flag, {"again": (x, y)}

    return step, (dense(64, 64), normal(32, 64), normal(8, 8), True)


@program()
def none_and_empty_containers():
    def step(state, batch, extra):
        return {**state, "w": state["w"] - batch.mean(0)}, (), None, {}, extra

    return step, ({"w": normal(64), "opt": None, "aux": ()}, normal(32, 64), [None, {}, []])


@program()
def python_scalars():
    def step(w, x, rate, count, flag):
        y = jnp.where(flag, x @ w, x)
        return w * (1 - rate), y, count + 1, rate / 2

    return step, (dense(64, 64), normal(32, 64), 0.1, 3, True)


@program()
def numpy_arguments():
    def step(batch, w):
        return jnp.asarray(batch["x"]) @ w, batch["n"] * 2

    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    return step, ({"x": x, "n": np.int32(4)}, dense(64, 16))


@struct.dataclass
class TrainState:
    step: Any
    params: Any
    opt: Any
    key: Any
    optimizer: Any = struct.field(pytree_node=False)
    name: str = struct.field(pytree_node=False, default="run")


@program()
def train_state_with_static_fields():
    """Flax's usual dataclass: an optimizer and a string ride along; the key is split each step."""

    def step(state, batch):
        key, use = jax.random.split(state.key)

        def loss_fn(params):
            noise = 0.1 * jax.random.normal(use, batch["x"].shape)
            return squares(params, {**batch, "x": batch["x"] + noise})

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt = state.optimizer.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt=opt, key=key), loss

    optimizer, params = optax.adam(1e-2, eps=EPS), mlp_params()
    state = TrainState(0, params, optimizer.init(params), jax.random.key(4), optimizer)
    return step, (state, batch_of())


class Carry(NamedTuple):
    params: Any
    history: Any
    count: Any


@program()
def history_buffer():
    """A named tuple with a ring buffer of losses, written at a traced place."""

    def step(carry, batch):
        loss, grads = jax.value_and_grad(squares)(carry.params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, carry.params, grads)
        history = carry.history.at[carry.count % 16].set(loss)
        return Carry(params, history, carry.count + 1), {"mean": history.mean()}

    return step, (Carry(mlp_params(), jnp.zeros(16), jnp.int32(5)), batch_of())


@program()
def nnx_dropout_state():
    """NNX: the counts of random streams are state, too."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 128, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.down = nnx.Linear(128, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(self.drop(nnx.relu(self.up(x))))

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, rest, batch):
        def loss(params):
            net = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
            value = jnp.mean((net(batch["x"]) - batch["y"]) ** 2)
            return value, nnx.split(net, nnx.Param, ...)[2]

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new, value

    return step, (params, rest, batch_of())


@program()
def reinforcement_learning_update():
    """Advantages by a backward scan, a clipped ratio, an entropy bonus."""

    def step(params, rollout):
        def back(carry, t):
            advantage = t["reward"] + 0.99 * carry[1] - t["value"] + 0.9 * carry[0]
            return (advantage, t["value"]), advantage

        times = {k: rollout[k].T for k in ("reward", "value")}
        zero = jnp.zeros(32)
        _, advantage = jax.lax.scan(back, (zero, zero), times, reverse=True)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)

        def loss(params):
            logp = jax.nn.log_softmax(mlp(params, rollout["seen"]))
            chosen = jnp.take_along_axis(logp, rollout["action"][..., None], -1)[..., 0]
            ratio = jnp.exp(chosen - rollout["logp"])
            gain = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2)) * advantage.T
            return -gain.mean() + 0.01 * jnp.sum(jnp.exp(logp) * logp, -1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rollout = {
        "seen": normal(32, 10, 64),
        "action": integers(16, 32, 10),
        "logp": normal(32, 10, scale=0.1) - 2.7,
        "reward": normal(32, 10, seed=1),
        "value": normal(32, 10, seed=2),
    }
    return step, (mlp_params(), rollout)


@program()
def diffusion_step():
    """Noise at a random time per row, a prediction of the noise."""

    def loss(params, x, key):
        times, noise = jax.random.split(key)
        t = jax.random.uniform(times, (len(x), 1))
        eps = jax.random.normal(noise, x.shape)
        angle = t * jnp.pi / 2
        features = jnp.cos(t * 2.0 ** jnp.arange(32))
        noisy = jnp.concatenate([jnp.cos(angle) * x + jnp.sin(angle) * eps, features], -1)
        return jnp.mean((mlp(params, noisy) - eps) ** 2)

    return jax.value_and_grad(loss), (mlp_params(64, 128, 32), normal(64, 32), jax.random.key(1))


@program(whole="scalars only")
def scalars_only():
    def step(state):
        return {"x": state["x"] * 0.9 + 1, "n": state["n"] + 1}

    return step, ({"x": jnp.float32(2), "n": jnp.int32(0)},)


@program(whole="an odd size everywhere: 8 devices can split none of it evenly")
def odd_sizes():
    def step(w, x):
        return jnp.tanh(x @ w)

    return step, (normal(5, 7), normal(3, 5))
