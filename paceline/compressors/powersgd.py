"""PowerSGD: matrices of low rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compressor import Compressor, Payload, Pieces
from paceline.fields import Count
from paceline.state import Cell, State, Vector


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Every weight matrix as a product of two thin ones, by one step of the power method, with error feedback.

    Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727).

    in each matrix M <- v + e:  P <- mean over workers of M Q;  P <- orthonormal columns of P
                                Q <- mean over workers of M^T P;  mean of M is about P Q^T;  e <- M - P (M^T P)^T

    Q starts at random, the same on all workers, and is kept (warm start). Biases, other vectors, and matrices that
    would not shrink to half are sent as they are. Sent: rank * (rows + columns) values for each matrix. A weight of
    more dimensions is a matrix of its first one by the others. Where there is a server, or a mean of a group, each
    worker sends the P and Q of its own matrix. Differs from the paper's code: it sends the first 1000 updates whole.
    """

    rank: Count = 4
    shared = ("q",)

    @property
    def retained(self) -> float:
        return 1.0

    def cells(self, x0: Vector) -> dict[str, Cell]:
        rng = torch.Generator().manual_seed(0)
        columns = sum(matrix.shape[1] for matrix in self._matrices(x0)[0])
        q = torch.randn((max(columns, 1), self.rank), generator=rng, dtype=torch.float64)
        return super().cells(x0) | {"q": q.to(x0.dtype).to(x0.device)}

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        matrices, rest = self._matrices(v)
        p = [_orthonormal(m @ q) for m, q in zip(matrices, self._split(s.cell("q"), matrices), strict=True)]
        q = [m.T @ one for m, one in zip(matrices, p, strict=True)]
        if q:
            s.cell("q").copy_(torch.cat(q))
        return _flat(p, v), _flat(q, v), _flat(rest, v)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        p, q, rest = payload
        return self._whole(p, q, rest, like)

    def pieces(self, s: State, v: Vector, seed: int) -> Pieces:
        error, old = s.cell("error"), s.cell("q")
        error.add_(v)
        matrices, rest = self._matrices(error)
        rows = sum(m.shape[0] for m in matrices) * self.rank
        first = [m @ q for m, q in zip(matrices, self._split(old, matrices), strict=True)]
        mean = yield torch.cat((_flat(first, v), _flat(rest, v)))
        p, plain = mean[:rows], mean[rows:]
        given = [_orthonormal(one) for one in self._split(p.view(-1, self.rank), matrices, rows=True)]
        q = _flat([m.T @ one for m, one in zip(matrices, given, strict=True)], v)
        flat = _flat(given, v)
        error.sub_(self._whole(flat, q, _flat(rest, v), v))
        if not matrices:
            return self._whole(flat, q, plain, v)
        mean = yield q
        old.copy_(mean.view_as(old))
        return self._whole(flat, mean, plain, v)

    def _matrices(self, v: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices that are worth it, and all other parameters."""
        matrices: list[Tensor] = []
        rest: list[Tensor] = []
        for part in self.parameters(v):
            rows, columns = part.shape[0], math.prod(part.shape[1:])
            worth = part.dim() > 1 and 2 * self.rank * (rows + columns) <= part.numel()
            (matrices if worth else rest).append(part.reshape(rows, columns) if worth else part.reshape(-1))
        return matrices, rest

    def _split(self, thin: Tensor, matrices: list[Tensor], *, rows: bool = False) -> list[Tensor]:
        sizes = [m.shape[0 if rows else 1] for m in matrices]
        return list(torch.split(thin, sizes)) if sizes else []

    def _whole(self, p: Tensor, q: Tensor, rest: Tensor, like: Vector) -> Vector:
        out = torch.empty_like(like)
        matrices, others = self._matrices(out)  # views
        left = self._split(p.to(like.dtype).view(-1, self.rank), matrices, rows=True)
        right = self._split(q.to(like.dtype).view(-1, self.rank), matrices)
        for matrix, one, other in zip(matrices, left, right, strict=True):
            torch.mm(one, other.T, out=matrix)
        for part, value in zip(others, torch.split(rest.to(like.dtype), [o.numel() for o in others]), strict=True):
            part.copy_(value)
        return out


def _flat(parts: list[Tensor], like: Vector) -> Vector:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def _orthonormal(p: Tensor) -> Tensor:
    """The columns made orthonormal, one after the other; columns without length become zero."""
    p = p.clone()
    columns = p.unbind(1)
    for k, column in enumerate(columns):
        for before in columns[:k]:
            column -= before * (before @ column)
        length = column.norm()
        column /= torch.where(length > torch.finfo(p.dtype).tiny, length, torch.full_like(length, math.inf))
    return p
