"""Stands for the optimizer of a compiled model: it keeps the gradients of a batch and changes no weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class GradientRecorder(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Part of Keras's own train step, compiled with it on every backend."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate=learning_rate, name="paceline")
        self._kept: list[Any] = []

    def build(self, variables: Sequence[Any]) -> None:
        """One variable for the gradient of each weight."""
        if self.built:
            return
        super().build(variables)
        self._kept = [self.add_variable_from_reference(one, name="gradient") for one in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Keep a gradient; that of an embedding may be sparse."""
        kept = self._kept[self._get_variable_index(variable)]
        self.assign(kept, keras.ops.cast(keras.ops.convert_to_tensor(gradient), kept.dtype))

    def gradients(self, variables: Sequence[Any]) -> list[Any]:
        """Those of the last batch, in the order of the variables."""
        return [self._kept[self._get_variable_index(one)].value for one in variables]
