"""Uploads exported models to the Hugging Face hub, with the metrics of their training."""

import math
import os
import pathlib
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.io import one_line, read_object, say

_CARD = "README.md"
_PREFIXES = ("dev/", "test/")  # of the metrics in a trainer's result.json


def add_metrics(folder: pathlib.Path, workdir: str, step: int | None, component: str) -> None:
    """Writes the metrics of a training into the model card, as the hub's ``model-index``.

    Args:
      folder: the exported model; a card without metadata gets some, and a missing card is created.
      workdir: the training workdir. If its result.json is missing or of another step, nothing
        changes.
      step: the step of the exported checkpoint.
      component: the name of the model.
    """
    result = read_object(pathlib.Path(workdir).expanduser() / "result.json", optional=True)
    metrics = {
        key: value
        for key, value in result.items()
        if key.startswith(_PREFIXES) and isinstance(value, int | float) and math.isfinite(value)
    }
    if not metrics or result.get("best_step") != step:
        return
    from huggingface_hub import EvalResult, metadata_load, metadata_save
    from huggingface_hub.repocard_data import eval_results_to_model_index

    path = folder / _CARD
    old = (metadata_load(path) or {}) if path.exists() else {}
    default = "sentence-similarity" if component == "aligner" else "text-generation"
    task = old.get("pipeline_tag", default)
    results = [
        EvalResult(
            task_type=task,
            dataset_type="cirag_jax",
            dataset_name=f"{key.partition('/')[0]} questions of the training",
            dataset_split=key.partition("/")[0],
            metric_type=key.partition("/")[2],
            metric_value=value,
        )
        for key, value in metrics.items()
    ]
    metadata_save(path, old | {"model-index": eval_results_to_model_index(component, results)})


def push(folder: pathlib.Path, repository: str, *, private: bool, dry_run: bool) -> str | None:
    """Uploads a folder to a model repository, which is created if missing; returns its address.

    The token is that of the environment variable ``HF_TOKEN``. With ``dry_run``, shows on standard
    error what would be sent, and sends nothing.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"config.push_to={repository!r}: {one_line(str(error))}") from None
    if dry_run:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        kind = "private" if private else "public"
        say(f"would upload to https://huggingface.co/{repository} ({kind} if it is new):")
        for path in files:
            say(f"{path.stat().st_size:>14,} bytes  {path.relative_to(folder)}")
        card = folder / _CARD
        for line in card.read_text("utf-8").splitlines() if card.exists() else ["(no model card)"]:
            say(line)
        return None
    token = os.environ.get("HF_TOKEN", "").strip()
    kept = f"the export in {folder} is complete"
    if not token:
        raise UserError(f"config.push_to needs a token in the variable HF_TOKEN; {kept}")
    try:
        api: Any = HfApi(token=token)
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of the network, the server, or the file system
        reason = one_line(str(error)).replace(token, "***")[:300] or type(error).__name__
        raise UserError(f"{repository} was not uploaded ({reason}); {kept}") from None
    return f"https://huggingface.co/{repository}"
