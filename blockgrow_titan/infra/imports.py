"""What torchtitan 0.2.2 loads at import and this plugin may never need: loaded on first use instead.

Whatever is imported from torchtitan, its text datasets come along, and with them ``datasets``, ``pandas`` and ``pyarrow``;
and its attention compiles three functions, which loads Inductor, though a run without flex or varlen attention never
calls them. Together they take about a third of all imports. ``titan_on_demand`` stands in for both while torchtitan's
modules are imported, and is gone afterwards: what is imported or compiled later is the real thing at once.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

TEXT_DATASETS = "torchtitan.hf_datasets.text_datasets"
TEXT_DATASET_BUILDERS = ("build_text_dataloader", "build_text_validation_dataloader")


def _called_later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    call.__name__ = name
    return call


def _compiled_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """``torch.compile`` of a function, at its first call; inside a compiled region it is traced through, as always."""
    if function is None:
        return functools.partial(_compiled_later, **options)
    compiled = functools.cache(lambda: torch.compile(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

    return call


@contextlib.contextmanager
def titan_on_demand() -> Iterator[None]:
    """Import torchtitan's modules within it; without effect where torchtitan has been imported already."""
    if "torchtitan" in sys.modules:
        yield
        return
    stand_in = ModuleType(TEXT_DATASETS)
    for name in TEXT_DATASET_BUILDERS:
        setattr(stand_in, name, _called_later(TEXT_DATASETS, name))
    sys.modules[TEXT_DATASETS], compile_ = stand_in, torch.compile
    torch.compile = _compiled_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_
        del sys.modules[TEXT_DATASETS]
