"""The command `paceline watch`, and the page of `paceline train --watch`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline import signals
from paceline.cli.commands import WatchOptions
from paceline.cli.console import messages, say
from paceline.errors import UsageError
from paceline.processes.parent_death import die_with_parent
from paceline.report.web.server import WatchServer
from paceline.report.web.watched_runs import chosen
from paceline.runs import atomic_files
from paceline.runs.run_directory import RUNS

ADDRESS = "watch.url"  # in the run directory: the address of the page, where no terminal shows it


def watch(asked: WatchOptions) -> None:
    if asked.parent:
        die_with_parent(signal.SIGTERM, asked.parent)
    with WatchServer(chosen(asked.runs, RUNS), asked.port) as server:
        # on stdout, and nowhere else: anybody who reads the address can open the page
        print(server.address, flush=True)
        if not asked.parent:
            say("open this address in a browser of this machine; Ctrl-C ends the page, the runs go on")
        with suppress(signals.Interrupted):  # the usual end
            server.serve_forever(poll_interval=60.0)


@contextmanager
def page_of(run: Path) -> Iterator[None]:
    """Have a process of its own show a run while inside: the launcher of a run forks, and must have no threads."""
    command = [sys.executable, "-m", "paceline", "watch", str(run.absolute()), "--parent", str(os.getpid())]
    place = run / ADDRESS
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the run, whose end the page shows
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise UsageError("the page of --watch could not be started; what stopped it is above")
            if messages.is_terminal:
                say(f"watch: {address}")
            else:  # a log may be read by others
                atomic_files.write_bytes(place, f"{address}\n".encode(), private=True, durable=False)
                say(f"watch: the address of the page is in {place}, which only you can read")
            yield
        finally:
            process.terminate()
            place.unlink(missing_ok=True)
