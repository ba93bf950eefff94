"""What ``asymlab train`` says to the ranks that it starts."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import typer

from asymcheck_lab.errors import UsageError
from asymcheck_lab.launch import Host, is_launched, read_hosts, usual_ranks


def hosts_of(parallel: str, device: str, ranks: int | None, hostfile: Path | None) -> list[Host]:
    """Where ranks are to be started; nowhere for one process, or for one that is a rank itself.

    Args:
        parallel: How ranks share the model.
        device: Where they train.
        ranks: How many are asked for on this host.
        hostfile: Names other hosts.

    Raises:
        UsageError: These contradict each other, or the launcher that started this process.
        DataError: See ``read_hosts``.
    """
    if parallel == "none":
        if hostfile is not None or (ranks or 1) > 1:
            raise UsageError(
                "parallel: expected ddp, fsdp2 or a zero for several ranks, found none"
            )
        return []
    if hostfile is not None and ranks is not None:
        raise UsageError("ranks: expected none with a hostfile, which has slots, found one")
    if is_launched():
        world = os.environ["WORLD_SIZE"]
        if hostfile is not None:
            raise UsageError(
                "hostfile: expected none under a launcher, which has its own, found one"
            )
        if ranks is not None and str(ranks) != world:
            raise UsageError(f"ranks: expected {world}, which the launcher started, found {ranks}")
        return []
    if hostfile is not None:
        return read_hosts(hostfile)
    return [Host("127.0.0.1", ranks or usual_ranks(device))]


def said_again(context: typer.Context, *, without: Collection[str]) -> list[str]:
    """The command of ``context`` as words of a command line, with all its options."""
    words = [context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or parameter.name in without:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            words += [parameter.opts[0], str(value)]
    return words
