"""Snakemake that looks at its jobs every second. The executor's pauses grow by ten seconds at each look, and Snakemake
does not end before the last of them is over."""

import asyncio

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor


async def second(executor: RemoteExecutor) -> None:
    await asyncio.sleep(1)


if __name__ == "__main__":
    RemoteExecutor.sleep = second
    main()
