import json
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from cirag_jax.errors import UserError
from cirag_jax.models.io.hub import add_metrics, push

CARD = "---\nlibrary_name: peft\npipeline_tag: text-ranking\n---\n\n# Reader\n"


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "README.md").write_text(CARD)
    (model / "model.safetensors").write_bytes(b"x" * 1234)
    return model


@pytest.fixture
def hub(monkeypatch):
    """Replaces the client of the hub; returns what it was asked for."""
    calls = []

    class Api:
        error: Exception | None = None

        def __init__(self, token):
            calls.append(("token", token))

        def create_repo(self, repo_id, **options):
            calls.append(("create", repo_id, options))
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, repo_id, folder_path):
            calls.append(("upload", repo_id, folder_path))
            if Api.error:
                raise Api.error

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return SimpleNamespace(calls=calls, api=Api)


def test_card_has_metrics_of_training(folder, tmp_path):
    result = {"dev/recall@5": 0.75, "dev/mrr": None, "best_step": 3, "complete": True}
    (tmp_path / "result.json").write_text(json.dumps(result))
    add_metrics(folder, str(tmp_path), 2, "reader")
    assert (folder / "README.md").read_text() == CARD  # the metrics are of another step
    add_metrics(folder, str(tmp_path), 3, "reader")
    card: Any = huggingface_hub.ModelCard.load(folder / "README.md")
    (metric,) = card.data.eval_results
    assert (metric.metric_type, metric.metric_value, metric.dataset_split) == (
        "recall@5", 0.75, "dev",
    )  # fmt: skip
    assert metric.task_type == "text-ranking" and card.data.library_name == "peft"
    assert card.text.strip() == "# Reader"


def test_card_without_result_is_unchanged(folder, tmp_path):
    add_metrics(folder, str(tmp_path), None, "reader")
    assert (folder / "README.md").read_text() == CARD


def test_push_uploads_privately(folder, hub):
    assert push(folder, "reader", private=True, dry_run=False) == "https://huggingface.co/me/reader"
    assert hub.calls == [
        ("token", "hf_secret"),
        ("create", "reader", {"private": True, "exist_ok": True}),
        ("upload", "me/reader", folder),
    ]


def test_push_dry_run_sends_nothing(folder, hub, capsys):
    assert push(folder, "me/reader", private=True, dry_run=True) is None
    shown = capsys.readouterr().err
    assert "huggingface.co/me/reader (private" in shown and "1,234 bytes  model.saf" in shown
    assert "# Reader" in shown and "hf_secret" not in shown
    assert hub.calls == []


def test_push_failure_is_one_sentence_without_token(folder, hub, monkeypatch):
    hub.api.error = OSError("401 for hf_secret\nat line 2")
    with pytest.raises(
        UserError, match=r"not uploaded \(401 for \*\*\*.*model is complete"
    ) as info:
        push(folder, "reader", private=True, dry_run=False)
    assert "\n" not in str(info.value) and info.value.__suppress_context__
    with pytest.raises(UserError, match="config.push_to='a b': Repo id must"):
        push(folder, "a b", private=True, dry_run=False)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="needs a token in the variable HF_TOKEN"):
        push(folder, "reader", private=True, dry_run=False)
    assert (folder / "README.md").read_text() == CARD
