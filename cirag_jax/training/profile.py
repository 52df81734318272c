"""Traces of training steps for XProf, TensorBoard's profiler or Perfetto."""

import pathlib
import re

import jax

from cirag_jax import io
from cirag_jax.errors import UserError
from cirag_jax.io import Closing

FOLDER = "profile"


class StepProfile(Closing):
    """Writes a trace of some steps to ``workdir/profile``; each process traces its own devices.

    Steps are sent to the devices while the previous step runs. The trace therefore starts after
    step FIRST - 1 was sent. It ends with step LAST, or on exit from the context.

    Args:
      steps: ``FIRST:LAST``, or None for no trace. A run that resumes after FIRST traces the
        remaining steps.
      workdir: an existing folder.
    """

    def __init__(self, steps: str | None, workdir: pathlib.Path):
        self._folder = workdir / FOLDER
        self._first, self._last = (0, 0) if steps is None else parse_steps(steps)
        self._tracing = False

    def sent(self, step: int) -> None:
        """Starts the trace if the next step is the first step to trace."""
        if not self._tracing and self._first - 1 <= step < self._last:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True

    def ended(self, step: int) -> None:
        """Writes the trace after the last step to trace."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace if it has started."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            if jax.process_index() == 0:
                io.say(f"wrote a profile to {self._folder}")


def parse_steps(steps: str) -> tuple[int, int]:
    """Parses ``FIRST:LAST``."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps)
    if match is None or not 2 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"config.profile_steps={steps!r} must be FIRST:LAST with 2 <= FIRST <= LAST, such as "
            "10:20."
        )
    return int(match[1]), int(match[2])
