"""A trace of some steps of a training run, for XProf, TensorBoard's profiler or Perfetto."""

import pathlib
import re

import jax

from cirag_jax import io
from cirag_jax.errors import UserError
from cirag_jax.io import Closing

FOLDER = "profile"


class StepProfile(Closing):
    """Traces some steps into ``workdir/profile``, each process its own devices.

    A step is sent to the devices while the one before still runs. So the trace begins once the step
    before the first has been sent, and ends when the last has ended. Leaving the context manager
    ends it early.

    Args:
      steps: ``FIRST:LAST``; None: nothing is traced. A run that goes on beyond FIRST traces what is
        left of them.
      workdir: an existing folder.
    """

    def __init__(self, steps: str | None, workdir: pathlib.Path):
        self._folder = workdir / FOLDER
        self._first, self._last = (0, 0) if steps is None else parse_steps(steps)
        self._tracing = False

    def sent(self, step: int) -> None:
        """Begins, if the step after this one is to be traced."""
        if not self._tracing and self._first - 1 <= step < self._last:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True

    def ended(self, step: int) -> None:
        """Writes the trace, if this was its last step."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes what has been traced, if anything is; more calls do nothing."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            if jax.process_index() == 0:
                io.say(f"a profile is in {self._folder}")


def parse_steps(steps: str) -> tuple[int, int]:
    """The first and the last step of ``FIRST:LAST``; `UserError`: see `StepProfile`."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps)
    if match is None or not 2 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"config.profile_steps={steps!r} must be FIRST:LAST with 2 <= FIRST <= LAST, such as "
            "10:20."
        )
    return int(match[1]), int(match[2])
