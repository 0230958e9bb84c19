"""A server whose jobs are forked off it; prints what two jobs find, as JSON: `FILE`.

The first process of the jobs is killed between them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import psutil

from quire.serving.job_messages import JobLimits
from quire.serving.job_starts import JobProcess, fork_job_process
from quire.serving.jobs import Jobs
from tests.serving import job_functions as functions


async def look_twice(process: JobProcess) -> list[dict[str, object]]:
    """Return what a job of the fork finds, and one of the program that takes its place."""
    jobs = Jobs(functions.Opened, JobLimits(at_once=1), process=process)
    first, found = await jobs.run(functions.look_around)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    second, then = await jobs.run(functions.look_around)
    await jobs.close()
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)
    return [found, then]


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w"), socket.create_server(("127.0.0.1", 0)):
        functions.IN_MEMORY.append("made before")
        print(json.dumps(asyncio.run(look_twice(fork_job_process()))))
