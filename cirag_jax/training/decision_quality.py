"""What a student in training decides, read from its own words: greedy decoding on dev questions."""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from cirag_jax.evaluation import decisions
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.models import lora
from cirag_jax.models.lora import LoraConfig
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.scheduler import Scheduler, progress_bar
from cirag_jax.types import Trajectory

# Metric -> score of `decisions.score`, against the teacher.
SCORES = {
    "dev/core_precision": "teacher/precision",
    "dev/core_recall": "teacher/recall",
    "dev/core_f1": "teacher/f1",
    "dev/query_f1": "query_f1",
    "dev/stop_accuracy": "stop_accuracy",
    "dev/parse_rate": "parse_rate",
}


class DecisionQuality:
    """Scores an adapter's decisions at every step of a teacher's trajectories, at least one.

    The trajectories are of questions that are not trained on, the engine is over the frozen base.
    ``prompt`` has the `PROMPT_FIELDS` as the student is trained; a decision has at most
    ``max_tokens`` tokens.
    """

    def __init__(
        self,
        engine: Engine,
        lora_config: LoraConfig,
        trajectories: Sequence[Trajectory],
        prompt: Mapping[str, Any],
        max_tokens: int,
    ):
        self._engine = engine
        self._options = lora.lora_options(lora_config, train=False)
        self._trajectories = trajectories
        self._steps = sum(len(trajectory.steps) for trajectory in trajectories)
        self._settings = CiragConfig(**prompt)
        self._handler = GenerateHandler(engine, {"integrator": max_tokens})

    def __call__(self, adapter: nnx.State) -> dict[str, float]:
        """The metrics of `SCORES`; those that nothing counts for are left out."""
        self._engine.set_adapter(lora.to_adapter(adapter), self._options)
        with (
            tempfile.TemporaryDirectory(prefix="cirag_decisions") as folder,
            Journal(pathlib.Path(folder) / "journal.sqlite", {}) as journal,
            progress_bar(self._steps, "step", "dev decisions") as show,
        ):
            scheduler = Scheduler(
                {"integrator": self._handler}, journal, in_flight=256, on_progress=show
            )
            jobs = decisions.jobs(self._trajectories, self._settings)
            records = scheduler.records_of([job for row in jobs for job in row])
        self._engine.set_adapter(None)  # Its memory is the trainer's again.
        assert records is not None  # Neither budget nor deadline is set.
        found = decisions.read(jobs, records)
        scores = decisions.score(
            self._trajectories, found, normalization=self._settings.normalization
        )
        values = {metric: scores[name].value for metric, name in SCORES.items()}
        return {metric: value for metric, value in values.items() if value == value}
