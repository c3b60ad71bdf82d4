"""What a rank of the fault tests runs: the package's entry point, with faults built in.

``run`` is for processes of the fork server. As a module (``TRAIN_FILE=tests.fault_tests.ranks`` of ``run_train.sh``) this
is the same for ranks that torchrun starts, with the faults in the environment variable ``BLOCKGROW_TEST_KILLS``.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
from typing import Any

import torch

from blockgrow_titan.train import main
from tests.fault_tests.points import Kill, install
from tests.unit_tests import jobs  # noqa: F401  (the flavor "toy")

KILLS = "BLOCKGROW_TEST_KILLS"


def run(
    arguments: list[str],
    kills: list[Kill],
    counts: str | None = None,
    prepare: str | None = None,
    prepare_arguments: dict[str, Any] | None = None,
) -> None:
    """Run this rank's share of a job, as ``python -m blockgrow_titan.train ARGUMENTS`` would.

    Args:
        arguments: The command line.
        kills: Faults; those of other ranks are left out.
        counts: A file for how often this rank came to each point, as JSON; None to count only what ``kills`` needs.
        prepare: ``module:function`` to call first.
        prepare_arguments: Its keyword arguments.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if prepare is not None:
        module, _, name = prepare.partition(":")
        getattr(importlib.import_module(module), name)(**(prepare_arguments or {}))
    counters = install([kill for kill in kills if kill.rank == int(os.environ["RANK"])], everything=counts is not None)
    sys.argv = ["train", *arguments]
    main()
    if counts is not None:
        with open(counts, "w") as file:
            json.dump({name: counter.number for name, counter in counters.items()}, file)


def run_under_torchrun() -> None:
    """The same for a rank of torchrun's, whose faults are those of its own attempt (torchrun counts its restarts)."""
    attempts: list[list[dict[str, Any]]] = json.loads(os.environ.get(KILLS, "[]"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kills = [Kill(**kill) for kill in attempts[attempt]] if attempt < len(attempts) else []
    install([kill for kill in kills if kill.rank == int(os.environ["RANK"])])
    main()


if __name__ == "__main__":
    run_under_torchrun()
