"""FedOpt: federated averaging in which the server's rule uses the mean delta as a gradient."""

from dataclasses import dataclass

from paceline.rules import Adam, Rule
from paceline.schemes.fedavg import FedAvg


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedOpt: the mean delta of the clients is a gradient for the server's rule (FedAdam, FedAvgM, FedAdagrad, …).

    Reddi et al. 2020 (arXiv 2003.00295), Algorithm 1.

    worker:  y, v <- pull() once a round has chosen it;  `window` times: y <- y - lr * gradient(y);  push(x - y, v, i)
    server:  when all chosen are here: x <- server.rule(x, mean of x - y_i weighted by samples);  v <- v + 1

    `server.lr` is the server's rate; a rule without one has 1: server.rule=sgd is fedavg, server.rule=momentum FedAvgM.
    Differs from the paper: Adam's start-up bias is removed, as in torch.
    """

    server_rule: Rule = Adam(lr=0.01, beta2=0.99, eps=1e-3)
    family = "local updates"
    good_for = "clients with sparse or uneven gradients"
    volume = "2 / window"
    limit = "that of the server's rule along the mean delta"
    equals = "server.rule=sgd server.lr=1 is fedavg"

    @property
    def applied(self) -> Rule:
        return self.server_rule
