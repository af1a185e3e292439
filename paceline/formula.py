"""Arithmetic written as text, such as `2 / window`: what a scheme sends per gradient, in documents and as a number."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import SchemeError

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}


def evaluated(text: str, values: Mapping[str, Any]) -> float:
    """The value of a formula of numbers, names, + - * /, `a or b` (b if a is not given), min and max."""

    def of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in values:
                return values[name]
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](of(left), of(right))
            case ast.BoolOp(ast.Or(), parts):
                return next((value for part in parts if (value := of(part))), 0)
            case ast.Call(ast.Name(name), arguments) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(of, arguments))
            case _:
                raise SchemeError(f"{ast.unparse(node)!r} in {text!r} is no arithmetic of {', '.join(values)}")

    return float(of(ast.parse(text, mode="eval").body))
