"""Whether all ranks read the same documents, and the same as before.

    each student rank: its sources -> count and digest -> all ranks compare -> compared with the checkpoint to resume

Every rank reads its own copy of the files, maybe on another machine; one that differs would train on other documents
without anyone noticing.
"""

from typing import Any

import torch.distributed as dist

from blockgrow_titan.growth.manifest import DataIdentity, check_data, data_differences, read_manifest
from blockgrow_titan.job_config import ConfigError
from blockgrow_titan.teacher.worlds import World


def agreed_identity(sources: dict[str, Any], world: World, checkpoint: str | None) -> DataIdentity:
    """Say which documents a run's sets hold; all student ranks must call, over the default process group.

    Args:
        sources: "training" and maybe "validation". One without ``identity``, of another builder's, is left out.
        world: This rank's world.
        checkpoint: Folder of the checkpoint to resume, None for a fresh start.

    Returns:
        ``{set: {"documents", "digest"}}``, the manifest's ``data``.

    Raises:
        ConfigError: If a rank cannot read its documents, reads others than rank 0 (both are named with their hosts), or
            the checkpoint was written with others. Every rank raises the same.
    """
    data, error = _identify(sources)
    by_rank: list[Any] = [None] * world.role_size
    dist.all_gather_object(by_rank, (world.host, data, error))
    first_host, first, _ = by_rank[0]
    for rank, (host, theirs, error) in enumerate(by_rank):
        if error:
            raise ConfigError(f"student rank {rank} on {host}: {error}")
        if theirs != first:
            raise ConfigError(
                f"student rank {rank} on {host} reads other documents than rank 0 on {first_host}: "
                f"{data_differences(first, theirs, 'rank 0 has', f'rank {rank} has')}. Give every machine the same files"
            )
    if checkpoint:
        try:
            check_data(read_manifest(checkpoint), data, checkpoint)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return data


def _identify(sources: dict[str, Any]) -> tuple[DataIdentity, str | None]:
    """This rank's data, and why it cannot be read."""
    try:
        return {name: source.identity() for name, source in sources.items() if hasattr(source, "identity")}, None
    except ValueError as error:
        return {}, str(error)
