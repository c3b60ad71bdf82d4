"""Integration tests: whole jobs through `run_train.sh`, in the shape of torchtitan's own harness.

`features.py` lists the jobs as `OverrideDefinitions`, `run_tests.py` runs them, `reading.py` reads what they wrote.
torchtitan's harness looks at exit codes; here the `checks` of a definition look at values too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class OverrideDefinitions:
    """One integration test: one or more launches into the same dump folder, then checks of what they wrote."""

    override_args: Sequence[Sequence[str]] = ((),)
    """
    Extra arguments of each launch; the launches run one after the other. `{dump}` in an argument stands for the dump
    folder, so `--job.dump_folder {dump}/other` gives a launch a folder of its own, which the checks can compare.
    """
    test_descr: str = "default"
    """What the test shows, in one line."""
    test_name: str = "default"
    """Unique name: selects the test and names its folder."""
    ngpu: int | Sequence[int] = 2
    """Ranks: one number, or one for each launch."""
    launcher: str = ""
    """Script that starts every launch, relative to the root of the repository; empty: the harness's, `run_train.sh`."""
    config: str = "train_configs/grow_post.toml"
    """Base TOML file, relative to the root of the repository."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every launch."""
    disabled: str = ""
    """Reason to skip the test; empty runs it."""
    checks: Sequence[Callable[[Path], None]] = ()
    """Called in order with the dump folder after the last launch; a check that raises fails the test."""
    expect_failure: str = ""
    """
    Text that the last launch must print while it exits with a status other than 0. Empty: every launch must succeed.
    """
    kill_at_step: int = 0
    """
    If not 0, every process of the first launch gets SIGKILL once `metrics.jsonl` in the dump folder has the train line
    of this step; the test fails if the launch ends before.
    """
    timeout: float = 600.0
    """Seconds that one launch may take before it is killed, which fails the test."""

    def ranks(self, launch: int) -> int:
        """The number of ranks of launch `launch`, counted from 0."""
        return self.ngpu if isinstance(self.ngpu, int) else self.ngpu[launch]

    def __repr__(self) -> str:
        return f"{self.test_name}: {self.test_descr}"
