"""A Slurm job after its submission: the body of its batch script, and how the job is followed from outside."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline import signals
from paceline.errors import RunError
from paceline.launchers._foreground import Tail

# Exit codes of the step: 0 the run has ended, 130 it was interrupted, above 128 a task was killed. The signal goes to
# the step's processes and not to srun, which would kill them; of these only the task's main process acts on it.
BODY = """
# What each task runs, its command behind it. If it fails before there is a hub, the others would wait for one.
task='{gpus}"$@" && exit
code=$?
if [ "$code" -lt 128 ] && [ ! -e "$PACELINE_MEET" ]; then
  echo "$code" >"$PACELINE_MEET.failed"
  scancel "$SLURM_JOB_ID.$SLURM_STEP_ID"
fi
exit "$code"'

job={job}
run={run}
requeue={requeue}
ending=no

# How far the run has got: the update of its newest checkpoint, -1 without one.
newest() {{
  local found=-1 one
  for one in "$run"/checkpoints/[0-9]*; do
    one=${{one##*/}} one=${{one%%[!0-9]*}}
    [ -z "$one" ] || [ "$((10#$one))" -le "$found" ] || found=$((10#$one))
  done
  echo "$found"
}}

# A file counts the requeues in a row without a newer checkpoint.
vain=0
if [ -n "$SLURM_RESTART_COUNT" ] && [ -s "$PACELINE_MEET.requeues" ]; then
  read -r vain saved <"$PACELINE_MEET.requeues"
  [ "$(newest)" -gt "$saved" ] && vain=0 || vain=$((vain + 1))
fi
saved=$(newest)
echo "$vain $saved" >"$PACELINE_MEET.requeues"
no_progress() {{
  local stood="a newer checkpoint than that of update $saved"
  [ "$saved" -ge 0 ] || stood="any checkpoint"
  echo "job $job ends: it was requeued $vain times in a row without $stood (--engine requeues={requeues});" \
    "give it more time (--engine time=…), or make checkpoints more often (--checkpoint-seconds)"
}}
if [ "$vain" -gt {requeues} ]; then no_progress; exit 1; fi

# Whether the step has come to an end of its own, good or bad. A task that is interrupted while Python starts ends with
# any code, and then no result was written in this life.
ended_by_itself() {{
  case $code in 0 | 2 | 3 | 143) return 0 ;; 130) return 1 ;; esac
  [ "$run/result.json" -nt "$PACELINE_MEET.requeues" ] && [[ $(<"$run/result.json") == *\"error\"* ]]
}}
last_checkpoint() {{
  ending=yes again=yes
  echo "the time of job $job is nearly over: a last checkpoint"
  scancel --signal=INT "$SLURM_JOB_ID"
}}
{trap}
[ -z "$SLURM_RESTART_COUNT" ] || echo "job $job is restarted ($SLURM_RESTART_COUNT), from the newest checkpoint"

for attempt in $(seq 0 {restarts}); do
  rm -f "$PACELINE_MEET" "$PACELINE_MEET.failed"  # of an earlier hub
  {step} &
  step=$! again=yes
  while [ "$again" = yes ]; do  # the signal interrupts the waiting
    again=no
    wait "$step"
    code=$?
  done
  [ ! -e "$PACELINE_MEET.failed" ] || code=$(cat "$PACELINE_MEET.failed")
  if [ "$ending" = yes ] && [ "$requeue" = yes ] && ! ended_by_itself; then
    if [ "$(newest)" -le "$saved" ] && [ "$vain" -ge {requeues} ]; then no_progress; exit 1; fi
    echo "job $job is requeued, and resumes from there"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
  # 143: ended on purpose
  if [ "$ending" = yes ] || [ "$code" -le 128 ] || [ "$code" = 130 ] || [ "$code" = 143 ]; then break; fi
  if [ "$attempt" -lt {restarts} ]; then
    echo "a task was killed (exit code $code): the step is restarted from the newest checkpoint"
  fi
done
exit "$code"
"""

_OVER = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"),
    *("DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "SPECIAL_EXIT"),
}
_PATIENCE = 300.0  # seconds without any answer of the controller
_BEAT = 0.1  # seconds between two looks for a signal


def asked(*words: str) -> str:
    """The output of one of Slurm's commands."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise RunError(f"{words[0]}: {cause(done.stderr)}")
    return done.stdout


def cause(text: str) -> str:
    """The last error that a command printed, without the command's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error: |fatal: )?", "", lines[-1]) if lines else "no reason is given"


def records(text: str) -> list[dict[str, str]]:
    """The fields of `scontrol show job -o`, which prints one job on each line."""
    return [dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)) for line in text.splitlines() if "JobState=" in line]


def follow(number: str, output: Path | None, say: Callable[[str], None]) -> int:
    """Report the states and the output of a job until it has ended. Returns its exit code."""
    watch, asked, heeded = _Watch(number, output, say), signals.Counter(), 0
    with signals.counted(asked):
        while True:
            code = watch.look()
            if code is not None:
                return code
            until = time.monotonic() + watch.pause()
            while asked.count == heeded and time.monotonic() < until:
                time.sleep(_BEAT)
            while heeded < asked.count:
                heeded += 1
                watch.interrupt()


class _Watch:
    def __init__(self, number: str, output: Path | None, say: Callable[[str], None]) -> None:
        self._number, self._say, self._interrupts = number, say, 0
        self._output = None if output is None else Tail(output)
        self._began = self._answered = time.monotonic()
        self._told: dict[str, str] = {}
        self._restarts: dict[str, str] = {}

    def pause(self) -> float:
        """Seconds until the next look: few at first, later more, to spare the controller."""
        return min(5.0, 0.5 + (time.monotonic() - self._began) / 60)

    def look(self) -> int | None:
        """The exit code once all jobs have ended; else None."""
        try:
            found = records(asked("scontrol", "show", "job", "-o", self._number))
        except (RunError, subprocess.TimeoutExpired) as error:
            return self._unanswered(error)
        self._answered = time.monotonic()
        ended = [one for one in found if one["JobState"] in _OVER]
        for one in found:
            if one not in ended:
                self._tell(one)
        over = bool(found) and ended == found
        for line in () if self._output is None else self._output.lines(over=over):
            self._say(line)  # before the report that the job has ended
        for one in ended:
            self._tell(one)
        return max(_code(one) for one in found) if over else None

    def interrupt(self) -> None:
        self._interrupts += 1
        waits = all(state.startswith("waits") for state in self._told.values())
        in_order = self._interrupts == 1 and not waits
        asked = f"interrupted: job {self._number} is asked to end in order, with a last checkpoint (again to cancel it)"
        self._say(asked if in_order else f"cancelling job {self._number}")
        signal = ["--signal=INT"] if in_order else []
        subprocess.run(["scancel", *signal, self._number], capture_output=True, check=False)

    def _unanswered(self, error: Exception) -> int | None:
        if "Invalid job id" in str(error):
            raise RunError(f"Slurm no longer knows job {self._number}; the run directory shows how it ended")
        if time.monotonic() - self._answered > _PATIENCE:
            told = f"Slurm's controller has not answered for {_PATIENCE:g} s ({error})"
            raise RunError(f"{told}; job {self._number} may still run: see squeue -j {self._number}")
        return None

    def _tell(self, one: dict[str, str]) -> None:
        name = one["JobId"]
        if "ArrayTaskId" in one:
            name = f"{one.get('ArrayJobId', name)}_{one['ArrayTaskId']}"
        if one.get("Restarts", "0") != self._restarts.get(name, "0"):
            self._restarts[name] = one["Restarts"]
            lost = f"requeued (restart {one['Restarts']}): a node was lost, or its time was over"
            self._say(f"job {name} was {lost}; it resumes from its newest checkpoint")
        state = _in_words(one)
        if self._output is None and one["JobState"] in _OVER - {"COMPLETED"} and one.get("StdOut"):
            state += f"; see {one['StdOut']}"
        if state != self._told.get(name):
            self._told[name] = state
            self._say(f"job {name} {state}")


def _in_words(one: dict[str, str]) -> str:
    state, reason = one["JobState"].lower().replace("_", " "), one.get("Reason", "None")
    known = {
        "pending": "waits" + (f" ({reason})" if reason not in ("None", "") else ""),
        "running": f"runs on {one.get('NodeList', '?')}",
        "completed": "has ended",
    }
    ended = f"has ended: {state}, exit code {_code(one)}" if one["JobState"] in _OVER else f"is {state}"
    return known.get(state, ended)


def _code(one: dict[str, str]) -> int:
    """The exit code of the batch script; 128 + signal if it was killed; at least 1 if the job failed."""
    code, _, number = one.get("ExitCode", "0:0").partition(":")
    known = int(code) or (128 + int(number) if number.isdigit() and int(number) else 0)
    return 0 if one["JobState"] == "COMPLETED" else known or 1
