"""torchrun for ``run_train.sh``, with an ending that a person can read.

torchrun answers every failure with its own traceback, and every signal by ending its ranks. Here

- a mistake in the config ends with that one line and exit status 2;
- SIGTERM, SIGINT or SIGHUP asks the ranks to finish their step and save (``blockgrow_titan/stopping.py``), and the exit
  status is 0 if they have; a second one ends everything at once, with the status that a shell would give;
- any other failure ends with one line that names the rank that failed first, its host and the cause, and exit status 1.

Takes torchrun's arguments. Imports nothing of the plugin, whose imports belong into the ranks.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

LAUNCH_FOLDER = "BLOCKGROW_LAUNCH_FOLDER"
LAUNCHER_PID = "BLOCKGROW_LAUNCHER_PID"
STOP_FILE = "BLOCKGROW_STOP_FILE"
CONFIG_ERROR_STATUS = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a rank fails with because another one has: never the first cause while there is another.
CONSEQUENCE = re.compile(
    r"PeerLost|PeerFailed|RankLost|[Cc]onnection (was )?(closed|reset|refused)|DistNetworkError|(killed|ended) by SIGTERM"
)
STUCK_SECONDS = 5.0
RESTART_SECONDS = 600.0  # torchrun may wait that long for the other nodes before it starts ranks again
AT_ONCE_SECONDS = 10  # torchrun kills ranks that do not end after 30 s


class StopRequests:
    """Turns the first signal into a stop request for the ranks, and the second into the end of all.

    Args:
        folder: The launch's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.request = Path(os.environ.get(STOP_FILE) or folder / "stop")
        self.now = folder / "stop_now"
        self.first: signal.Signals | None = None
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.first is None:
            self.first = signal.Signals(number)
            self.request.touch()
            _say(f"{name}: the job finishes its step and saves. A second signal ends it at once")
            return
        self.now.touch()
        raise SignalException(f"{name} for the second time", signal.Signals(number))  # as torchrun's own handler


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # a signal handler may interrupt a print


def read_note(folder: Path, name: str) -> str:
    """A line that a rank has left, empty if it has not."""
    path = folder / name
    return path.read_text().strip() if path.exists() else ""


def first_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed by itself: one killed by a signal, or else the first with a cause of its own.

    Args:
        failures: By global rank, never empty. Among them are the survivors that torchrun has ended: by SIGTERM, and by
            SIGKILL half a minute later.
    """
    first = min(failure.timestamp for failure in failures.values())
    early = [rank for rank, failure in failures.items() if failure.timestamp <= first + AT_ONCE_SECONDS]

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        consequence = CONSEQUENCE.search(_cause(failure)) is not None
        return consequence, failure.exitcode >= 0, failure.timestamp

    return min(early, key=order)


def _cause(failure: ProcessFailure) -> str:
    """What ended a rank, as one line."""
    if failure.exitcode < 0:
        return f"killed by {failure.signal_name()}"
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):  # of an exception; without one, a text of torchrun's own
        return " ".join(str(message.get("message")).split())
    if failure.exitcode > 128:
        return f"ended by {signal.Signals(failure.exitcode - 128).name}"
    return f"ended with exit status {failure.exitcode}"


def failure_lines(error: ChildFailedError, folder: Path, shown: str) -> list[str]:
    """Role, rank, host and cause of the rank that failed first, after its traceback if the console has not shown it.

    Args:
        error: What torchrun noticed.
        folder: The launch's folder.
        shown: The local ranks on the console, as "0,1".
    """
    rank = first_cause(error.failures)
    failure = error.failures[rank]
    line = f"Failed: {read_note(folder, f'rank-{rank}') or f'rank {rank}'}: {_cause(failure)}"
    message = failure.error_file_data.get("message")
    traceback = message.get("extraInfo", {}).get("py_callstack", "") if isinstance(message, dict) else ""
    hidden = traceback and str(failure.local_rank) not in shown.split(",")
    return [traceback.rstrip(), line] if hidden else [line]


def noted_failure(folder: Path) -> str:
    """The last line of a launch whose end torchrun does not tell, from what its ranks have left; empty without that.

    What they left before the newest of them started is of an earlier attempt.
    """
    started = max((path.stat().st_mtime_ns for path in folder.glob("rank-*")), default=0)
    found = []
    for path in folder.glob("failure-*"):
        written, cause = path.stat().st_mtime_ns, path.read_text().strip()
        if path.suffix == "" and written >= started:
            found.append((CONSEQUENCE.search(cause) is not None, written, path.name.partition("-")[2], cause))
    if not found:
        return ""
    _, _, rank, cause = min(found)
    return f"Failed: {read_note(folder, f'rank-{rank}') or f'rank {rank}'}: {cause}"


def end_if_stuck(folder: Path, patience: float) -> None:
    """End this process if its ranks have failed and are gone, but torchrun hangs; never returns.

    It does in a call to the first node's store that the network, or that node, swallows.

    Args:
        folder: The launch's folder.
        patience: Seconds for torchrun to notice, or to start the ranks again.
    """
    since = None
    while True:
        time.sleep(1.0)
        line = noted_failure(folder)
        if not line or any(map(_runs, psutil.Process().children())):
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since > patience:
            _say(line)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ending_of(stop: StopRequests, folder: Path) -> int:
    """Tell how a job ended whose ranks all ended well; returns the exit status."""
    ending = read_note(folder, "ending")
    if ending:
        print(ending, file=sys.stderr)
    if stop.first is None or not ending.startswith("Not saved"):
        return 0
    return 128 + stop.first


def main(arguments: list[str]) -> int:
    """Run the job; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="blockgrow_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ[LAUNCH_FOLDER], os.environ[LAUNCHER_PID] = name, str(os.getpid())
        stop = StopRequests(folder)
        options = parse_args(arguments)
        options.signals_to_handle = "SIGQUIT"  # the others are handled here
        patience = RESTART_SECONDS if options.max_restarts else STUCK_SECONDS
        threading.Thread(target=end_if_stuck, args=(folder, patience), name="end if stuck", daemon=True).start()
        try:
            run(options)
        except ChildFailedError as error:
            if line := read_note(folder, "config_error"):
                print(line, file=sys.stderr)
                return CONFIG_ERROR_STATUS
            print(*failure_lines(error, folder, options.local_ranks_filter), sep="\n", file=sys.stderr)
            return 1
        except RendezvousError as error:
            print(
                noted_failure(folder) or f"Failed: this node's launcher lost that of the first node: {error}",
                file=sys.stderr,
            )
            return 1
        except SignalException as signalled:
            print(
                f"Stopped by {signal.Signals(signalled.sigval).name}. The same command goes on from the last checkpoint",
                file=sys.stderr,
            )
            return 128 + signalled.sigval
        return ending_of(stop, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
