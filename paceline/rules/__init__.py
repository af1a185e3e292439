"""Update rules: torch.optim's arithmetic on the flat vector, with the rule's memory in named cells.

Each rule is a frozen dataclass. `rule.cells(x)` gives its memory; `rule.apply(state, g, lr)` changes x in place.
"""

from __future__ import annotations

import inspect

from paceline.rules.elementwise import Adagrad, Adam, AdamW, Momentum, Nesterov, RMSprop
from paceline.rules.rule import SGD, Rule, Window
from paceline.rules.torch_rules import (
    ASGD,
    Adadelta,
    Adafactor,
    Adamax,
    Muon,
    NAdam,
    OptimizerRule,
    RAdam,
    Rprop,
    TorchRule,
)

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "OptimizerRule",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Rule",
    "TorchRule",
    "Window",
    "rules",
]


def rules() -> dict[str, type[Rule]]:
    """Every rule that has a name, by name."""
    found = (value for value in globals().values() if inspect.isclass(value) and issubclass(value, Rule))
    return {rule.name: rule for rule in found if rule is not Rule and rule.listed}


def of_class(path: str) -> OptimizerRule:
    """The rule that runs an optimizer's class, given as `module:Class` or `file.py:Class`."""
    return OptimizerRule(path=path)


Rule.known = rules()
Rule.of_class = of_class
