"""What every compressor costs and saves: milliseconds to encode and decode, and bytes.

One thread. The vectors are gradients of a network of square matrices. `pays below` is the rate of a link below which
the compressor pays: encoding a vector, and decoding one, take less than the bytes that are not sent.

    python benchmarks/compress.py --sizes 400,40000 --rounds 5
    python benchmarks/compress.py --sizes 4000 --only topk,int8 --json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.compressor import Compressor
from paceline.config import build, discovery
from paceline.ops import nbytes
from paceline.state import State


def layered(kilobytes: int) -> list[tuple[int, ...]]:
    """Shapes of a network of about this size: four square matrices with their biases."""
    width = max(math.isqrt(kilobytes * 1000 // 16), 1)
    return [(width, width), (width,)] * 4


def measured(compressor: Compressor, kilobytes: int, rounds: int) -> dict[str, Any]:
    shapes = layered(kilobytes)
    length = sum(map(math.prod, shapes))
    fitted = compressor.fitted(shapes)
    rng = torch.Generator().manual_seed(0)
    state = State(**fitted.cells(torch.zeros(length)), v=0, workers=2)
    packing, decoding, payload = [], [], ()
    for seed in range(rounds + 1):
        v = torch.randn(length, generator=rng)
        began = time.perf_counter()
        payload, _ = fitted.pack(state, v, seed)
        packed = time.perf_counter()
        fitted.decode(payload, v)
        packing.append(packed - began)
        decoding.append(time.perf_counter() - packed)
    encode, decode = statistics.median(packing[1:]), statistics.median(decoding[1:])
    whole, sent = 4 * length, nbytes(payload)
    pays = 8 * (whole - sent) / (encode + decode) / 1e6
    return {
        "compressor": str(compressor),
        "kilobytes": whole / 1000,
        "encode_ms": 1000 * encode,  # with error feedback, which decodes too
        "decode_ms": 1000 * decode,
        "ratio": whole / sent,
        "pays_below_mbit": pays,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="400,40000", help="kilobytes of the vectors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="compressors with their options, by semicolons; default: all")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = asked.only.split(";") if asked.only else list(discovery.compressors())
    rows = []
    for size in map(int, asked.sizes.split(",")):
        for name in names:
            compressor = build.compressor_of(name)
            assert compressor is not None
            rows.append(measured(compressor, size, asked.rounds))
    if asked.json:
        print(json.dumps(rows))
        return
    table = Table("compressor", "kB", "encode ms", "decode ms", "smaller by", "pays below Mbit/s")
    for row in rows:
        table.add_row(
            row["compressor"],
            f"{row['kilobytes']:.0f}",
            f"{row['encode_ms']:.2f}",
            f"{row['decode_ms']:.2f}",
            f"{row['ratio']:.3g}",
            f"{row['pays_below_mbit']:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
