"""Judges the answers of runs by a language model, and two judges by each other."""

import collections
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from cirag_jax.commands import backends, comparison, evaluation, identity
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.evaluation import judge_prompts as prompts
from cirag_jax.evaluation.agreement import agreement
from cirag_jax.evaluation.metrics import raw
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.scoring import Answered
from cirag_jax.evaluation.significance import pairwise_scores
from cirag_jax.llm.types import Message
from cirag_jax.reports.tables import Column, bounded, captioned, system_rows
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.types import Config

FILE = "judgements.jsonl"
TEXTS = ("answer", "response")
JUDGE, SECOND = "judge", "second"
BESIDE = ("em", "acc")  # metrics that the table shows, too


class Given(NamedTuple):
    """A run's answers to its questions, in one order for all runs.

    Attributes:
      name: how tables call the run.
      answered: questions and predictions.
      texts: what is judged of each; None: nothing, for there is no gold answer.
    """

    name: str
    answered: Sequence[Answered]
    texts: Sequence[str | None]


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Has one or two judges say which answers of ``config.runs`` are right.

    An answer that two runs gave to one question is judged once. One that is empty, as that of a
    question that failed, is wrong without being asked about; a question without a gold answer does
    not count, and neither does an answer that a judge gives no verdict about. Leaves
    ``judgements.jsonl``, ``table.md`` and a journal a judge; a run that was stopped goes on. Of
    several seeds the first is judged. ``config`` is of configs/judge.py.

    Returns:
      ``systems``: of every run ``judge`` and, where there is a second judge, ``second`` (shares of
      right answers with their 95 % intervals, questions resampled), ``em`` and ``acc`` likewise.
      ``differences``: of each pair of runs and score, as `pairwise`.
      ``agreement``: of two judges over all runs' answers, as `agreement`; else null.
      ``judges``: of each ``rubric``, ``model``, ``verdicts`` (answers asked about), ``unjudged``
      and ``failures`` among them, ``parse_errors``, tokens and seconds.
      ``num_questions``, ``without_gold``, ``empty`` (answers), ``settings``, ``complete``.
    """
    judges = _judges(config)
    runs = comparison.read_runs(comparison.named_folders(config.runs))
    ids = list(runs[0].records)
    given = [_given(config, run, ids) for run in runs]
    places = {name: [_jobs(config, name, run) for run in given] for name in judges}

    # ---- Every judge over all answers ------------------------------------------------------------
    def programs(name: str) -> tuple[list[Job], dict[str, Any]]:
        jobs = {job.id: job for row in places[name] for job in row if job is not None}
        bound = {"max_tokens": config.max_tokens, "retries": config.retries}
        return list(jobs.values()), {**bound, "rubric": config[name].rubric}

    models = {
        name: evaluation.Model(config[name], {}, schemas=config[name].constrained)
        for name in judges
    }
    asked = evaluation.ask_models(
        config, workdir, models, (JUDGE, config.max_tokens), programs, "answer"
    )
    verdicts: dict[str, list[list[bool | None]]] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, (records, usage) in asked.items():
        block = config[name]
        described[name] = {"rubric": block.rubric, "model": backends.model_name(block)}
        if records is not None:
            said = {i: record.result(Verdict) for i, record in records.items()}
            verdicts[name] = [
                _verdicts(said, *pair) for pair in zip(places[name], given, strict=True)
            ]
            described[name] |= _counted(said.values())
        described[name] |= usage

    # ---- Figures ---------------------------------------------------------------------------------
    scores = {
        run.name: {
            **{name: mean_of(found[i]) for name, found in verdicts.items()},
            **_beside(run, config.profile),
        }
        for i, run in enumerate(given)
    }
    systems = {
        run.name: evaluation.System(
            scores[run.name], {}, _rows(run, {name: row[i] for name, row in verdicts.items()})
        )
        for i, run in enumerate(given)
    }
    facts = {
        "agreement": _agreement(given, verdicts) if len(verdicts) == 2 else None,
        "judges": described,
        "num_questions": len(ids),
        "without_gold": sum(text is None for text in given[0].texts),
        "empty": sum(text == "" for run in given for text in run.texts),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            **{name: config[name] for name in ("text", "profile", "bootstrap_samples", "seed")},
        },
        "complete": len(verdicts) == len(judges),
    }
    differences = pairwise_scores(scores, config.bootstrap_samples, config.seed)
    return evaluation.report(config, workdir, systems, facts, table_of, FILE, differences)


def _judges(config: Config) -> tuple[str, ...]:
    """Checks the settings; returns the judges to ask."""
    judges = (JUDGE, SECOND) if config.second.run else (JUDGE,)
    check_choice("config.text", config.text, TEXTS)
    check_at_least(1, config, "max_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "retries")
    answers.check_profile(config.profile)
    for name in judges:
        check_choice(f"config.{name}.rubric", config[name].rubric, prompts.RUBRICS)
        if config[name].constrained:
            asking = f"config.{name}.constrained=true"
            backends.check_abilities(config, name, ("json_schema",), asking)
    if len(judges) == 2 and _identity(config, JUDGE) == _identity(config, SECOND):
        raise UserError(
            "config.second is the same model with the same rubric as config.judge; change one."
        )
    return judges


def _identity(config: Config, name: str) -> tuple[str, Any]:
    return config[name].rubric, identity.of_language_model(config[name])


def _given(config: Config, run: comparison.Run, ids: Sequence[str]) -> Given:
    answered = [comparison.answered_of(run.records[i]) for i in ids]
    texts: list[str | None] = []
    for question, found in answered:
        text = "" if found is None else found.answer if config.text == "answer" else raw(found)
        texts.append(text.strip() if question.answers else None)
    return Given(run.name, answered, texts)


# ------------------------------------------------------------------------------------- the verdicts


class Verdict(TypedDict):
    """``right``: None where there is no verdict; ``parse_errors``: kinds, one each time."""

    right: bool | None
    parse_errors: list[str]


def judge(
    messages: tuple[Message, ...], rubric: str, constrained: bool, retries: int
) -> Program[Verdict]:
    """Asks role ``judge`` about one answer until it gives a verdict, ``retries`` times again."""
    schema = prompts.verdict_schema(rubric) if constrained else None
    asked, problems, verdict = messages, list[str](), None
    for _ in range(retries + 1):
        said: Generated = yield Generate(asked, JUDGE, json_schema=schema)
        truncated = said.finish_reason == "length"
        verdict, found = prompts.parse_verdict(said.text, rubric, truncated=truncated)
        problems += found
        if verdict is not None:
            break
        asked = prompts.ask_again(messages, said.text, rubric)
    return {"right": verdict, "parse_errors": problems}


def _jobs(config: Config, name: str, given: Given) -> list[Job | None]:
    """Returns a judge's program about every answer of a run; None where nothing is asked."""
    return [
        _job(config, name, answered, text) if text else None
        for answered, text in zip(given.answered, given.texts, strict=True)
    ]


def _verdicts(
    said: Mapping[str, Verdict | None], jobs: Sequence[Job | None], given: Given
) -> list[bool | None]:
    """Returns a judge's verdict about every answer of a run; None where there is none."""
    verdicts: list[bool | None] = []
    for job, text in zip(jobs, given.texts, strict=True):
        verdict = said[job.id] if job else None
        right = verdict["right"] if verdict else None
        verdicts.append(False if text == "" else right)
    return verdicts


def _job(config: Config, name: str, answered: Answered, text: str) -> Job:
    """The program about one answer, known by all that is shown."""
    block, question = config[name], answered.question
    messages = prompts.judge_messages(question.question, text, question.answers, block.rubric)
    shown = [[message.role, message.text] for message in messages]
    how = (block.rubric, block.constrained, config.retries)
    return Job(codec.digest(codec.dump([shown, how])), shown, lambda: judge(messages, *how))


def _counted(said: Collection[Verdict | None]) -> dict[str, Any]:
    verdicts = [verdict for verdict in said if verdict is not None]
    errors = collections.Counter(kind for one in verdicts for kind in one["parse_errors"])
    return {
        "verdicts": len(said),
        "unjudged": sum(one["right"] is None for one in verdicts),
        "failures": len(said) - len(verdicts),
        "parse_errors": dict(sorted(errors.items())),
    }


# -------------------------------------------------------------------------------------- the figures


def _beside(one: Given, profile: str) -> dict[str, Ratio]:
    """EM and Acc of what is judged."""
    return {
        name: mean_of(
            [
                None if text is None else answers.METRICS[name](text, question.answers, profile)
                for (question, _), text in zip(one.answered, one.texts, strict=True)
            ]
        )
        for name in BESIDE
    }


def _agreement(
    given: Sequence[Given], verdicts: Mapping[str, Sequence[Sequence[bool | None]]]
) -> dict[str, Any]:
    """Over the distinct answers of all runs about which both judges gave a verdict."""
    pairs: dict[tuple[str, str], tuple[bool, bool]] = {}
    for one, *found in zip(given, *verdicts.values(), strict=True):
        for (question, _), text, *both in zip(one.answered, one.texts, *found, strict=True):
            if text and None not in both:
                pairs[question.id, text] = (bool(both[0]), bool(both[1]))
    first, second = zip(*pairs.values(), strict=True) if pairs else ((), ())
    return agreement(first, second)


def _rows(given: Given, verdicts: Mapping[str, Sequence[bool | None]]) -> list[dict[str, Any]]:
    return [
        {
            "id": question.id,
            "system": given.name,
            "question": question.question,
            "gold": question.answers,
            "judged": text,
            "answer": found.answer if found else "",
            **{name: right[place] for name, right in verdicts.items()},
        }
        for place, ((question, found), text) in enumerate(
            zip(given.answered, given.texts, strict=True)
        )
    ]


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a run, then the differences and the judges' agreement."""
    columns = [Column(f"{name} [95 %]", name, bounded) for name in result["judges"]]
    columns += [Column("EM", "em"), Column("Acc", "acc")]
    rows = system_rows("answers of", columns, result)
    described = (
        f"{name}: {told['model']}, rubric {told['rubric']}"
        + (f", {told['unjudged']} without a verdict" if told.get("unjudged") else "")
        for name, told in result["judges"].items()
    )
    caption = f"{result['num_questions']} questions; {'; '.join(described)}"
    table = captioned(caption, rows, result["complete"])
    both = result["agreement"]
    if both is None:
        return table
    agree = "n/a" if both["agree"] is None else f"{100 * both['agree']:.1f} %"
    kappa = f"n/a ({both['reason']})" if both["kappa"] is None else f"{both['kappa']:.2f}"
    return (
        f"{table}\n\nThe judges agree about {agree} of {both['num_answers']} answers, "
        f"Cohen's kappa {kappa}."
    )
