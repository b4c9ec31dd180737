"""Tasks beside a deployment's requests end when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from services.background import BackgroundTasks, end_tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = list[str]()

    async def run() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append("as asyncio.wait_for of Python 3.11 does")

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task], again_s=0.01), 5)
    assert task.cancelled()
    assert lost


async def test_tasks_end_before_stop_returns_and_what_ended_one_is_told() -> None:
    async def fail() -> None:
        raise ValueError("no")

    tasks = BackgroundTasks(follower=asyncio.sleep(3600), loop=fail())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"wisp-loop has ended: ValueError\('no'\)"):
        tasks.check()
    await tasks.stop()
    with pytest.raises(RuntimeError, match="wisp-follower has ended"):
        tasks.check()
