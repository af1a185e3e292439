"""A slow cable, without the kernel's netem: two TAP devices, and this process that carries frames between them late.

Runs in the switch's network: `wire.py HOST PID DELAY JITTER LOSS`. HOST is the name of the switch's end; the other end
is eth0 in the network of process PID. Milliseconds one way, and percent of the frames. Good for some 100 Mbit/s.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress

_SET_DEVICE, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_AT_ONCE = 64  # frames of one side, before the other's turn


def tap(name: str) -> int:
    """A network device whose frames are read from, and written to, a descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH", name.encode(), _TAP | _NO_HEADER))
    return descriptor


def carry(one: int, other: int, delay: float, jitter: float, loss: float) -> None:
    under_way: list[tuple[float, int, int, bytes]] = []
    count, last = 0, {one: 0.0, other: 0.0}
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for ready in select.select([one, other], [], [], wait)[0]:
            far = other if ready == one else one
            for _ in range(_AT_ONCE):
                try:
                    frame = os.read(ready, 65535)
                except BlockingIOError:
                    break
                if random.random() * 100 < loss:
                    continue
                due = time.monotonic() + max(0.0, delay + random.uniform(-jitter, jitter)) / 1e3
                due = last[far] = max(due, last[far])  # frames keep their order
                count += 1
                heapq.heappush(under_way, (due, count, far, frame))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, far, frame = heapq.heappop(under_way)
            with suppress(OSError):  # a device that is down, or full: lost
                os.write(far, frame)


def main(host: str, pid: str, delay: str, jitter: str, loss: str) -> None:
    outside, inside = tap(host), tap("slow")
    subprocess.run(["ip", "link", "set", "slow", "netns", pid, "name", "eth0"], check=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(outside, inside, float(delay), float(jitter), float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
