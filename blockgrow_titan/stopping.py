"""How a job is asked to stop, and how a rank ends that has no job any more.

The launcher (``tools/launch.py``) makes a folder for each launch on its node and names it in ``BLOCKGROW_LAUNCH_FOLDER``:

    stop          asks the job to finish its step, save and end; ``BLOCKGROW_STOP_FILE`` may name another place
    stop_now      a second signal: end without saving
    config_error  from a rank: a mistake in the config, one line
    ending        from a rank: how the run ended, one line
    rank-3        from global rank 3: its role and host, for the launcher's last line
    failure-3     from global rank 3: why it ends, where torchrun cannot tell

A rank learns from the first two what a SIGTERM means. torchrun sends it to the survivors of a crash, and they must end at
once, though their main thread may be stuck in a collective; a cluster may send it to every process of a job that it is
about to take the machines from, and then the step is finished and saved.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

LAUNCH_FOLDER = "BLOCKGROW_LAUNCH_FOLDER"
LAUNCHER_PID = "BLOCKGROW_LAUNCHER_PID"
STOP_FILE = "BLOCKGROW_STOP_FILE"
WATCH_SECONDS = 1.0
LAST_WORDS_SECONDS = 1.0
GRACE_SECONDS = 1.0  # between a SIGTERM that reached every process of a node and the launcher's stop request


before_end: list[Callable[[str], None]] = []
"""Called with the reason before ``watch`` ends this process; those that hang are left behind."""


def _path(name: str) -> str | None:
    folder = os.environ.get(LAUNCH_FOLDER)
    return os.path.join(folder, name) if folder else None


def stop_requested() -> bool:
    """Whether this node's launcher has been asked to stop the job. Cheap: one look at a file."""
    path = os.environ.get(STOP_FILE) or _path("stop")
    return path is not None and os.path.exists(path)


def _stop_now() -> bool:
    path = _path("stop_now")
    return path is not None and os.path.exists(path)


def note(name: str, text: str) -> None:
    """Leave one line for the launcher, whole or not at all; without effect if there is no launcher."""
    path = _path(name)
    if path is None:
        return
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(f"{' '.join(text.split())}\n")
    os.replace(temporary, path)


def has_note(name: str) -> bool:
    path = _path(name)
    return path is not None and os.path.exists(path)


def watch() -> None:
    """End this process at a SIGTERM that nobody asked for, and when its launcher is gone. Call once, from the main thread.

    A thread of its own watches: a Python signal handler would wait for the main thread to return from a collective. A
    process forked later keeps neither; one that is started anew, as torch starts its compilers, has the default again.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    parent = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    threading.Thread(target=_watch, args=(ours, parent), name="stopping", daemon=True).start()


def _watch(wakeups: int, parent: int) -> None:
    while True:
        readable, _, _ = select.select([wakeups], [], [], WATCH_SECONDS)
        if readable and signal.SIGTERM in os.read(wakeups, 64) and not _goes_on():
            _end("ended by SIGTERM: another rank has ended, or somebody stops this one", 128 + signal.SIGTERM)
        if os.getppid() != parent:
            _end("ended: its launcher is gone", 1)


def _goes_on() -> bool:
    """Whether a SIGTERM was meant as a request to stop, which the trainer heeds at the end of its step."""
    deadline = time.monotonic() + GRACE_SECONDS
    while not (requested := stop_requested()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return requested and not _stop_now()


def _end(text: str, status: int) -> None:
    print(f"Process {os.getpid()} {text}", file=sys.stderr, flush=True)
    for action in before_end:
        thread = threading.Thread(target=action, args=(text,), daemon=True)
        thread.start()
        thread.join(LAST_WORDS_SECONDS)
    os._exit(status)
