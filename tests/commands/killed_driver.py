"""Runs extractions that kill themselves (signal 9) after a given number of recorded events.

python killed_driver.py URL CORPUS OUT KILL...

For each KILL, one process runs in OUT/KILL and dies after KILL events (0: never). A second process
resumes the run. Prints the number of events of each first process. An event is a write to the
journal or the store. OUT/KILL.done lists the requests whose responses the first process recorded.
NAME in URL is replaced by KILL.
"""

import json
import os
import pathlib
import signal
import sys
import traceback

import openai  # noqa: F401  (once, here, and not in every child)

from cirag_jax.commands import extract
from cirag_jax.runtime.store import Journal
from cirag_jax.triples import store
from configs import extract as extract_config

BLOCK = 4


def main() -> None:
    url, corpus, out, *kills = sys.argv[1:]
    events = {}
    for kill in kills:
        pipe, end = os.pipe()
        child = os.fork()
        if child == 0:
            _run(url, corpus, pathlib.Path(out), kill, end, int(kill))
        os.close(end)
        with os.fdopen(pipe, "rb") as file:
            events[kill] = len(file.read())
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed == (kill != "0"), status
        if killed:
            child = os.fork()
            if child == 0:
                _run(url, corpus, pathlib.Path(out), kill, None, 0)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
    print(json.dumps(events))


def _run(url, corpus, out, name, pipe, kill) -> None:
    """Runs an extraction and exits the process."""
    count = 0

    def event(*_) -> None:
        nonlocal count
        if pipe is None:
            return
        os.write(pipe, b".")
        count += 1
        if count == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def announced(function, after=event):
        def wrapped(*arguments):
            event()
            result = function(*arguments)
            after(*arguments)
            return result

        return wrapped

    def recorded(_, key, request, response) -> None:
        if pipe is not None and not isinstance(response, Exception):
            with (out / f"{name}.done").open("a") as file:
                file.write(json.dumps(request.messages[-1].content) + "\n")
        event()

    for owner, method, *after in (
        (Journal, "record", recorded),
        (Journal, "open_program"),
        (Journal, "close_program"),
        (Journal, "forget"),
        (store, "_columns"),
        (store.TripleStore, "commit"),
    ):
        setattr(owner, method, announced(getattr(owner, method), *after))
    try:
        config = extract_config.get_config()
        config.update_from_flattened_dict(
            {
                "data.dir": corpus,
                "extractor.backend": "openai",
                "extractor.base_url": url.replace("NAME", name),
                "extractor.model": "m",
                "extractor.max_concurrency": 2,
                "extractor.max_retries": 0,
                "block": BLOCK,
                "in_flight": 3,
                "max_empty_share": 1.0,
            }
        )
        workdir = out / name
        workdir.mkdir(exist_ok=True)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (progress bars)
        result = extract.extract_corpus(config.lock(), workdir)
        (workdir / "result.json").write_text(json.dumps(result))
        os._exit(0)
    except BaseException:
        sys.stderr = sys.__stderr__
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
