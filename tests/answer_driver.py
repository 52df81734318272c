"""Runs ``launch/answer.py`` again and again, some of the times until it kills itself.

``python -m tests.answer_driver PLAN.json``: every run is a child of this process, which has
imported everything and touched no device, so that a run costs no start-up. A run of the plan has
``arguments``; ``kill``: null, or [n, "before" | "after"]: SIGKILL around the n-th write to the
journal; ``log``: a file that gets one line a batch, the places of the requests that the backends
were asked; ``out``: standard output; ``err``: standard error; ``keep``: null, or [from, to]: where
the journal lies and where it is copied to once the run has ended. Prints the exit statuses.
"""

import json
import os
import pathlib
import runpy
import signal
import sys


def _import_everything() -> None:
    import jax  # noqa: F401
    import transformers.models.auto.tokenization_auto

    import cirag_jax.commands.answer
    import cirag_jax.commands.opening  # noqa: F401
    import cirag_jax.models.io.pretrained
    import cirag_jax.models.io.workdir  # noqa: F401

    transformers.models.auto.tokenization_auto.AutoTokenizer  # noqa: B018


def _watch_backends(log: str) -> None:
    """Notes what the backends are asked, batch by batch, before they answer."""
    from cirag_jax.runtime import handlers

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watched(cls) -> None:
        answer = cls.__call__

        def call(self, calls, done):
            places = [[c.key.program, c.key.ordinal, c.key.part] for c in calls]
            os.write(file, (json.dumps([cls.__name__, places]) + "\n").encode())
            answer(self, calls, done)

        cls.__call__ = call

    for name in ("RetrieveHandler", "ExtractHandler", "RankHandler", "GenerateHandler"):
        watched(getattr(handlers, name))


def _kill_around_write(number: int, when: str) -> None:
    """SIGKILL before or after the ``number``-th response or end that the journal writes."""
    from cirag_jax.runtime.journal import Journal

    count = 0

    def watched(name: str) -> None:
        write = getattr(Journal, name)

        def wrapped(self, *arguments):
            nonlocal count
            count += 1
            if count == number and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, *arguments)
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(Journal, name, wrapped)

    watched("record")
    watched("close_program")


def _run(plan: dict) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(plan[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    _watch_backends(plan["log"])
    if plan["kill"] is not None:
        _kill_around_write(*plan["kill"])
    sys.argv = ["launch/answer.py", *plan["arguments"]]
    runpy.run_path("launch/answer.py", run_name="__main__")


def _copy_journal(workdir: pathlib.Path, to: pathlib.Path) -> None:
    """The journal as the run left it, its write-ahead log included."""
    to.mkdir(parents=True)
    for path in workdir.glob("journal.sqlite*"):
        (to / path.name).write_bytes(path.read_bytes())


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        plans = json.load(file)
    _import_everything()
    statuses = []
    for plan in plans:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(plan)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if plan["keep"] is not None:
            _copy_journal(*map(pathlib.Path, plan["keep"]))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
