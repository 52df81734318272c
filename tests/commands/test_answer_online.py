"""launch/answer.py with online extraction by a local model, killed and resumed."""

import signal

import pytest

from cirag_jax.runtime.records import read_settings
from tests import tiny_decoder
from tests.answering import VOLATILE, arguments, execute, journalled, lines, tiny_folders

pytestmark = pytest.mark.slow
NAME = "extractions.sqlite"


def test_answer_killed_online_extraction_resumes_without_repeats(tmp_path, command):
    folders = tiny_folders(tmp_path / "tiny")
    model = tiny_decoder.folder(tmp_path / "extractor", max_position_embeddings=4096)
    more = [
        "--config.triples=online", f"--config.extractor.model={model}", "--config.data.limit=3",
        "--config.extractor.max_tokens=5", "--config.extractor.batch_size=4",
        "--config.extractor.grounded=true",
    ]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # The second run ends after three retrievals, four responses of the extractor and the end of one
    # passage.
    plans = [
        {"arguments": arguments(folders, whole, *more)},
        {"arguments": arguments(folders, cut, *more), "stop": [8, "after"]},
        {"arguments": arguments(folders, cut, *more)},
    ]
    uncut, killed, resumed = execute(command, tmp_path / "logs", plans)
    assert uncut.status == 0, uncut.err
    assert read_settings(whole / NAME)["grounded"] is True
    result, extracted = uncut.result, journalled(whole, NAME)
    seen = {passage for row in lines(whole / "predictions.jsonl") for passage in row["passages"]}
    assert {program.partition("@")[0] for program, _, _ in extracted} == seen
    # The random model fails at every passage. Failed passages are not passages without triples.
    extraction = result["extraction"]
    assert extraction["passages"] == extraction["failures"] == len(seen) > 4
    assert extraction["prompt_tokens"] > 0 and extraction["generated_tokens"] > 0
    assert result["calls"]["extract"] >= 3 and "rank" not in result["calls"]
    assert result["parse_errors"]["passage_not_extracted"] >= len(seen)
    assert "passage_without_triples" not in result["parse_errors"]
    assert (result["answered"], result["complete"]) == (3, True)
    # Each passage was extracted once, by two calls, even if several questions retrieved it.
    assert len(extracted) == 2 * len(seen)
    asked = [place for place in uncut.asked if place in extracted]
    assert sorted(asked) == sorted(extracted)

    assert (killed.status, resumed.status) == (-signal.SIGKILL, 0), resumed.err
    before = [place for place in killed.asked if place in extracted]
    after = [place for place in resumed.asked if place in extracted]
    # Four responses were recorded. Only requests in flight are repeated.
    assert set(before) | set(after) == extracted and len(after) == len(extracted) - 4
    assert len(set(before) & set(after)) == len(before) - 4
    last = {program: ordinal for program, ordinal, _ in killed.asked}
    assert all(ordinal == last[program] for program, ordinal, _ in set(before) & set(after))
    assert (cut / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert {k: v for k, v in resumed.result.items() if k not in VOLATILE} == {
        k: v for k, v in result.items() if k not in VOLATILE
    }
