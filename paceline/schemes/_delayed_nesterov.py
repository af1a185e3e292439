"""Delayed Nesterov momentum: every push moves x at once, the momentum moves with every n-th."""

from paceline.scheme import Vector


def delayed_nesterov(
    x: Vector, m: Vector, b: Vector, p: Vector, *, last: bool, n: int, lr: float, momentum: float, activation: float
) -> None:
    """One push p; `last`: it is an n-th one. b holds the sum of the pushes since the last of those.

    b <- b + p;  last: m <- momentum * m + b / n;  x <- x - lr * ((1 - c n + c) * momentum * m + p / n);  b <- 0
    others: x <- x - lr * (c * momentum * m + p / n), with c = activation
    """
    b += p
    share = activation
    if last:
        m *= momentum
        m += b / n
        b.zero_()
        share = 1 - activation * n + activation
    x -= lr * (share * momentum * m + p / n)
