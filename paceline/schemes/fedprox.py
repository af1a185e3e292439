"""FedProx: federated averaging in which clients are held back near the centre."""

from dataclasses import dataclass

from paceline.scheme import Rate, Vector
from paceline.schemes.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: federated averaging with a proximal term, which keeps clients near x.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2018 (arXiv 1812.06127), Algorithm 2.

    worker:  y, v <- pull() once a round has chosen it;  `window` times: y <- y - lr * (gradient(y) + mu * (y - x))
             push(x - y, v, i)
    server:  as fedavg

    mu = 0 is fedavg. Differs from the paper: every client makes the same number of steps.
    """

    mu: Rate = 0.01
    family = "local updates"
    good_for = "clients whose data differ much"
    volume = "2 / window"
    limit = "lr * (h + mu) < 2"
    equals = "mu=0 is fedavg"

    def corrected(self, g: Vector, y: Vector, x: Vector) -> Vector:
        return (y - x).mul_(self.mu).add_(g) if self.mu else g
