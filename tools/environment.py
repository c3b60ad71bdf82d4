"""A tool that is started with a Python without the plugin's packages starts again in run_train.sh's environment."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_AGAIN = 'root=$1; shift; source "$root/setup_env.sh"; setup_env "$root" run; exec "$PYTHON" "$0" "$@"'


def enter(script: str) -> None:
    """Replace this process by ``script`` in the environment that ``setup_env.sh`` finds or makes, unless it is there.

    Args:
        script: The tool's ``__file__``; it gets this process's arguments.
    """
    if importlib.util.find_spec("torchtitan") or "BLOCKGROW_SETUP" in os.environ:
        return
    os.environ["BLOCKGROW_SETUP"] = "1"  # once
    sys.stdout.flush()
    os.execvp("bash", ["bash", "-euo", "pipefail", "-c", _AGAIN, script, str(ROOT), *sys.argv[1:]])
