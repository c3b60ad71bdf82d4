"""``blockgrow_titan.train`` with saves that take SLOW_SAVE_SECONDS longer, as those of a large model on a slow disk."""

import os
import time
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from blockgrow_titan.train import main

original = FileSystemWriter.finish


def finish(self: FileSystemWriter, *args: Any, **kwargs: Any) -> None:
    time.sleep(float(os.environ["SLOW_SAVE_SECONDS"]))
    original(self, *args, **kwargs)


if __name__ == "__main__":
    FileSystemWriter.finish = finish  # type: ignore[method-assign]
    main()
