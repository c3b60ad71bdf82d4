"""torchrun for ``run_train.sh``, with an ending that a person can read.

torchrun answers every failure with its own traceback. Here a mistake in the config ends with that one line and exit
status 2, a signal with one line and the status that a shell would give, and any other failure with torchrun's report of
the rank that failed first, without the agent's traceback.
Takes torchrun's arguments. Imports nothing of the plugin, whose imports belong into the ranks.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

ERROR_FILE = "BLOCKGROW_ERROR_FILE"
CONFIG_ERROR_STATUS = 2


def main(arguments: list[str]) -> int:
    """Run the job; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="blockgrow_") as folder:
        config_error = Path(folder) / "config_error"
        os.environ[ERROR_FILE] = str(config_error)
        try:
            run(parse_args(arguments))
        except ChildFailedError as error:
            if config_error.exists():
                print(config_error.read_text().strip(), file=sys.stderr)
                return CONFIG_ERROR_STATUS
            print(error, file=sys.stderr)
            return 1
        except SignalException as stop:
            print(
                f"Stopped by {signal.Signals(stop.sigval).name}. The same command goes on from the last checkpoint",
                file=sys.stderr,
            )
            return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
