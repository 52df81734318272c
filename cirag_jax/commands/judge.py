"""Judges the answers of runs by a language model, and two judges by each other."""

import collections
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from cirag_jax.commands import backends, comparison, side_by_side, task
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.evaluation import judge_prompts as prompts
from cirag_jax.evaluation.agreement import agreement
from cirag_jax.evaluation.metrics import raw
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, over
from cirag_jax.evaluation.significance import intervals, pairwise_scores
from cirag_jax.io import write_lines
from cirag_jax.llm.types import Message
from cirag_jax.reports.tables import captioned, figure, lead, write_table
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
    judges = _check(config)
    until = task.deadline(config)
    runs = comparison.read_runs(comparison.named_folders(config.runs))
    ids = list(runs[0].records)
    given = [_given(config, run, ids) for run in runs]
    result: dict[str, Any] = {
        "systems": {},
        "differences": {},
        "agreement": None,
        "judges": {},
        "num_questions": len(ids),
        "without_gold": sum(text is None for text in given[0].texts),
        "empty": sum(text == "" for one in given for text in one.texts),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            **{name: config[name] for name in ("text", "profile", "bootstrap_samples", "seed")},
        },
    }

    # ---- Every judge over all answers ------------------------------------------------------------
    verdicts: dict[str, list[list[bool | None]]] = {}
    for name in judges:
        found, result["judges"][name] = _judged(config, workdir, name, given, until)
        if found is not None:
            verdicts[name] = found
    result["complete"] = len(verdicts) == len(judges)

    # ---- Figures ---------------------------------------------------------------------------------
    scores = {
        one.name: {
            **{name: over(found[i]) for name, found in verdicts.items()},
            **_beside(one, config.profile),
        }
        for i, one in enumerate(given)
    }
    how_often = (config.bootstrap_samples, config.seed)
    result["systems"] = {name: intervals(own, *how_often) for name, own in scores.items()}
    result["differences"] = pairwise_scores(scores, *how_often)
    if len(verdicts) == 2:
        result["agreement"] = _agreement(given, verdicts)
    write_lines(workdir / FILE, _rows(given, verdicts))
    write_table(table_of(result), workdir)
    return result


def _check(config: Config) -> tuple[str, ...]:
    """The judges that are asked."""
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
    return config[name].rubric, backends.fingerprint(config[name])


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


def _judged(
    config: Config,
    workdir: pathlib.Path,
    name: str,
    given: Sequence[Given],
    until: float | None,
) -> tuple[list[list[bool | None]] | None, dict[str, Any]]:
    """A judge's verdict about every answer of every run, None where there is none; what it took.

    The first is None where the time or a budget ended before the last verdict.
    """
    block = config[name]
    jobs: dict[str, Job] = {}
    places: list[list[str | None]] = []
    for one in given:
        own = [
            _job(config, name, pair, text) if text else None
            for pair, text in zip(one.answered, one.texts, strict=True)
        ]
        jobs |= {job.id: job for job in own if job is not None}
        places.append([job.id if job is not None else None for job in own])
    records, usage = side_by_side.ask(
        config,
        workdir / f"{name}.sqlite",
        side_by_side.Model(block, {}, schemas=block.constrained),
        {"max_tokens": config.max_tokens, "retries": config.retries, "rubric": block.rubric},
        (JUDGE, config.max_tokens),
        list(jobs.values()),
        until,
        "answer",
    )
    told: dict[str, Any] = {"rubric": block.rubric, "model": backends.model_name(block)}
    if records is None:
        return None, {**told, **usage}
    said = {i: record.result(Verdict) for i, record in records.items()}
    right = {i: None if verdict is None else verdict["right"] for i, verdict in said.items()}
    found = [
        [
            right[place] if place is not None else None if text is None else False
            for place, text in zip(own, one.texts, strict=True)
        ]
        for own, one in zip(places, given, strict=True)
    ]
    return found, {**told, **_counted(said.values()), **usage}


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
        name: over(
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


def _rows(
    given: Sequence[Given], verdicts: Mapping[str, Sequence[Sequence[bool | None]]]
) -> list[dict[str, Any]]:
    return [
        {
            "id": question.id,
            "system": one.name,
            "question": question.question,
            "gold": question.answers,
            "judged": text,
            "answer": found.answer if found else "",
            **{name: own[i][place] for name, own in verdicts.items()},
        }
        for i, one in enumerate(given)
        for place, ((question, found), text) in enumerate(zip(one.answered, one.texts, strict=True))
    ]


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a run, then the differences and the judges' agreement."""
    judges = [name for name in (JUDGE, SECOND) if name in result["judges"]]
    header = ["answers of", *(f"{name} [95 %]" for name in judges), "EM", "Acc"]
    rows = [
        [
            name,
            *(figure(own.get(judge), bounds=True) for judge in judges),
            *(figure(own[metric]) for metric in BESIDE),
        ]
        for name, own in result["systems"].items()
    ]
    for name, own in result["differences"].items():
        rows.append([name, *(lead(own.get(score)) for score in (*judges, *BESIDE))])
    described = (
        f"{name}: {told['model']}, rubric {told['rubric']}"
        + (f", {told['unjudged']} without a verdict" if told.get("unjudged") else "")
        for name, told in result["judges"].items()
    )
    caption = f"{result['num_questions']} questions; {'; '.join(described)}"
    table = captioned(caption, [header, *rows], result["complete"])
    both = result["agreement"]
    if both is None:
        return table
    agree = "n/a" if both["agree"] is None else f"{100 * both['agree']:.1f} %"
    kappa = f"n/a ({both['reason']})" if both["kappa"] is None else f"{both['kappa']:.2f}"
    return (
        f"{table}\n\nThe judges agree about {agree} of {both['num_answers']} answers, "
        f"Cohen's kappa {kappa}."
    )
