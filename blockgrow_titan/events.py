"""Files of one JSON object a line, as ``metrics.jsonl``: read, and taken up again where a checkpoint left them."""

import json
import os
import shutil
from collections.abc import Iterable
from typing import Any

METRICS_FILE = "metrics.jsonl"
DIAGNOSTICS_FILE = "diagnostics.jsonl"
TAIL_BYTES = 1 << 16  # of a file, read first where only its last lines matter


def read_events(path: str) -> list[dict[str, Any]]:
    """All complete lines of a ``metrics.jsonl``; a last line cut by a crash is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = file.read().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is empty or was cut


def keep_until(events: Iterable[dict[str, Any]], step: int, phase: int) -> list[dict[str, Any]]:
    """The events that a run resumed from the checkpoint of ``step``, in ``phase``, will not produce again."""
    return [event for event in events if event["step"] < step or (event["step"] == step and event["phase"] <= phase)]


class EventFile:
    """A file of one JSON object a line, which a resumed run takes up where its checkpoint left it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def take_up(self, step: int, phase: int) -> list[dict[str, Any]]:
        """Drop every line that will be written again (all of them at step 0); returns what is kept of ``step`` itself.

        Lines stand in the order of their steps, so only the end of the file is parsed, however long the run has been.
        """
        end, kept = self._kept_end(step, phase) if step > 0 and os.path.exists(self.path) else (0, [])
        temporary = f"{self.path}.tmp"
        if end:
            shutil.copyfile(self.path, temporary)
        with open(temporary, "ab") as file:
            file.truncate(end)
        os.replace(temporary, self.path)
        self.file = open(self.path, "a", buffering=1)
        return kept

    def _kept_end(self, step: int, phase: int) -> tuple[int, list[dict[str, Any]]]:
        """Where the lines that are kept end, and those of them that are of ``step``."""
        size, block = os.path.getsize(self.path), TAIL_BYTES
        with open(self.path, "rb") as file:
            while True:
                start = max(0, size - block)
                file.seek(start)
                skipped = len(file.readline()) if start else 0  # the rest of a line whose beginning was not read
                lines = file.read().splitlines(keepends=True)
                events = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last may have been cut
                if not start or (events and events[0]["step"] < step):
                    break
                block *= 4
        kept = keep_until(events, step, phase)
        end = start + skipped + sum(len(line) for line in lines[: len(kept)])
        return end, [event for event in kept if event["step"] == step]

    def write(self, event: dict[str, Any]) -> None:
        """Append a line; without effect before ``take_up``."""
        if self.file is not None:
            self.file.write(json.dumps(event) + "\n")

    def flush(self) -> None:
        """Return once everything written is on disk."""
        if self.file is not None:
            os.fsync(self.file.fileno())  # it is buffered by the line

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def complete_events(path: str, step: int) -> None:
    """Complete the record of a run that was killed after its last save, of ``step``, which no launch takes up again.

    A cut line goes, and the checkpoint gets the line that it may lack.
    """
    events = read_events(path)
    if not events or events[-1]["event"] == "checkpoint":  # and then nothing follows it
        return
    last, file = events[-1], EventFile(path)
    if not any(event["event"] == "checkpoint" for event in file.take_up(step, last["phase"])):
        same = {name: last[name] for name in ("step", "phase", "active_blocks", "active_layers")}
        file.write({"event": "checkpoint"} | same)
    file.close()
