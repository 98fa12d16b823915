"""Starts commands of tacit as forks of a process that has imported everything, so that twenty restarts take seconds.

A fork shares nothing with its parent but what was imported, and a SIGKILL ends it as it ends any process. One line of
JSON on the standard input (the arguments) is answered by one line, the fork's number.
"""

import json
import os
import signal
import sys

import uvicorn  # noqa: F401

from tacit import adapt, cli, models, serve  # noqa: F401


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        try:
            cli.run(json.loads(line))
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
