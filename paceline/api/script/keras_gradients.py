"""Loss and gradient of a script's function, by the backend that Keras runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline.errors import UsageError

LossFunction = Callable[..., Any]
Found = tuple[Any, Sequence[Any]]  # the loss, and a gradient or None for each variable
COMPILED = 8  # functions, at most


class Differentiate(Protocol):
    """Calls a function of the model, and gives its loss with the gradients of the variables."""

    def __call__(self, function: LossFunction, arguments: tuple[Any, ...]) -> Found: ...


def differentiation(model: Any, variables: Sequence[Any]) -> Differentiate:
    """How the gradients of these variables are computed on this backend."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _TensorFlow(variables)
    if backend == "jax":
        return _Jax(model, variables)
    if backend == "torch":
        return _torch_gradients(variables)
    raise UsageError(
        f"Keras runs on {backend}, which computes no gradients: use tensorflow, jax or torch (KERAS_BACKEND)"
    )


class Compiled:
    """Functions with arguments are compiled once each; those without may hold anything, and run as they are."""

    def __init__(self, compile: Callable[[LossFunction], LossFunction]) -> None:
        self._compile = compile
        self._made: dict[int, tuple[LossFunction, LossFunction]] = {}  # with the function, whose id stays its own

    def of(self, function: LossFunction) -> LossFunction:
        """The compiled function; UsageError if every step brings a new one."""
        made = self._made.get(id(function))
        if made is None:
            if len(self._made) >= COMPILED:
                raise UsageError(
                    f"pace.step(function, …) has compiled {COMPILED} functions: define it once, before the loop"
                )
            made = self._made[id(function)] = function, self._compile(function)
        return made[1]


def checked(loss: Any) -> Any:
    """The loss; UsageError if it is none."""
    shape = getattr(loss, "shape", None)
    if shape is None:
        raise UsageError(f"the loss function gave {loss!r}: it must give the loss, a scalar tensor")
    if len(shape):
        raise UsageError(f"the loss has the shape {tuple(shape)}: give its mean or sum, a scalar")
    return loss


class _TensorFlow:
    def __init__(self, variables: Sequence[Any]) -> None:
        import tensorflow

        self._tensorflow = tensorflow
        self._variables = [one.value for one in variables]
        self._compiled = Compiled(lambda function: tensorflow.function(self._taped(function), reduce_retracing=True))

    def __call__(self, function: LossFunction, arguments: tuple[Any, ...]) -> Found:
        found: Found = (self._compiled.of(function) if arguments else self._taped(function))(*arguments)
        return found

    def _taped(self, function: LossFunction) -> LossFunction:
        def taped(*arguments: Any) -> Found:
            with self._tensorflow.GradientTape(watch_accessed_variables=False) as tape:
                for one in self._variables:
                    tape.watch(one)
                loss = checked(function(*arguments))
            found = tape.gradient(loss, self._variables)
            # those of embeddings are sparse
            return loss, [None if one is None else self._tensorflow.convert_to_tensor(one) for one in found]

        return taped


class _Jax:
    """The function is called in a StatelessScope: inside, the model's variables are what JAX differentiates by."""

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        import jax
        import keras

        self._scope = keras.StatelessScope
        self._variables, self._others = variables, list(model.non_trainable_variables)
        self._names = {id(one) for one in (*variables, *self._others)}
        self._value_and_grad: Callable[..., LossFunction] = jax.value_and_grad
        self._compiled = Compiled(lambda function: jax.jit(self._differentiated(function)))

    def __call__(self, function: LossFunction, arguments: tuple[Any, ...]) -> Found:
        compute = self._compiled.of(function) if arguments else self._differentiated(function)
        others = [one.value for one in self._others]
        (loss, changed), found = compute([one.value for one in self._variables], others, *arguments)
        for one, value in zip(self._others, changed, strict=True):
            one.assign(value)
        return loss, found

    def _differentiated(self, function: LossFunction) -> LossFunction:
        return self._value_and_grad(self._pure(function), has_aux=True)

    def _pure(self, function: LossFunction) -> LossFunction:
        def pure(values: list[Any], others: list[Any], *arguments: Any) -> tuple[Any, list[Any]]:
            mapping = [*zip(self._variables, values, strict=True), *zip(self._others, others, strict=True)]
            with self._scope(state_mapping=mapping) as scope:
                loss = checked(function(*arguments))
            changed = [scope.get_current_value(one) for one in self._others]
            foreign = [one for one in scope.state_mapping if one not in self._names]
            if foreign:
                raise UsageError(
                    "the loss function changes a variable that is not of the model (of a metric, or of another model), "
                    "which cannot be had on the JAX backend: do that outside of the function"
                )
            return loss, changed

        return pure


def _torch_gradients(variables: Sequence[Any]) -> Differentiate:
    def differentiate(function: LossFunction, arguments: tuple[Any, ...]) -> Found:
        with torch.enable_grad():
            loss = checked(function(*arguments))
        if not loss.requires_grad:
            return loss, [None] * len(variables)
        return loss.detach(), torch.autograd.grad(loss, [one.value for one in variables], allow_unused=True)

    return differentiate
