"""Evaluates answers with one or two language models as judges."""

import collections
import functools
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax import cli
from cirag_jax.commands import backends, comparison, evaluation, identity
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers, grounding
from cirag_jax.evaluation import judge_prompts as prompts
from cirag_jax.evaluation.agreement import agreement
from cirag_jax.evaluation.grounding import Verdict
from cirag_jax.evaluation.metrics import evidence_of, raw
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.scoring import AnsweredQuestion
from cirag_jax.evaluation.significance import pairwise_scores
from cirag_jax.llm.types import Message
from cirag_jax.methods.common import own_prompts
from cirag_jax.reports.tables import Column, captioned, percent_with_bounds, system_rows
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.types import Config

FILE = "judgements.jsonl"
TEXTS = ("answer", "response")
JUDGE, SECOND = "judge", "second"
RUBRICS = (*prompts.RUBRICS, *grounding.RUBRICS)
OTHER_METRICS = ("em", "acc")  # also shown in the table


class RunAnswers(NamedTuple):
    """The answers of a run; the order of the questions is the same for all runs.

    Attributes:
      name: the name of the run in tables.
      answered: questions and predictions.
      texts: the text to judge for each question.
    """

    name: str
    answered: Sequence[AnsweredQuestion]
    texts: Sequence[str]


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Lets one or two judges evaluate the answers of ``config.runs``; resumes interrupted runs.

    If runs give the same answer to a question, the answer is judged once. Empty answers, including
    those of failed questions, are wrong. Questions without a gold answer and answers without a
    verdict are ignored; the rubrics of `grounding` need no gold answer. Of several seeds, only the
    first is judged. Writes ``judgements.jsonl``, ``table.md`` and a journal per judge. ``config``
    comes from configs/judge.py.

    Returns:
      ``systems``: for every run, the shares of answers that are correct according to the first
      ``judge`` and the ``second`` judge, if there is one, or mean scores of `grounding`, and the
      scores ``em`` and ``acc``, all with 95 % bootstrap intervals.
      ``differences``: the differences between each pair of runs; see `pairwise_scores`.
      ``agreement``: the agreement of the two judges over all answers, see `agreement`; null if
      there is only one judge or a judge's rubric is one of `grounding`.
      ``judges``: for each judge its ``rubric``, ``model``, number of requested ``verdicts``, number
      of ``unjudged`` answers and ``failures`` among these, ``parse_errors``, tokens and seconds.
      ``num_questions``, ``without_gold``, ``empty`` (number of empty answers), ``settings``,
      ``complete``.
    """
    if config.export_prompts is not None:
        return cli.PrintOnly(own_prompts.export_file(config.export_prompts, _render))
    judges = _judges(config)
    with own_prompts.active(_own_prompts(config, judges)):
        return _evaluate(config, workdir, judges)


def _render() -> None:
    for rubric in prompts.RUBRICS:
        prompts.judge_messages("", "", (), rubric)
    grounding.statement_messages("", "")
    grounding.support_messages((), ())
    grounding.question_messages("")


def _own_prompts(config: Config, judges: Sequence[str]) -> own_prompts.OwnPrompts:
    """Reads ``config.prompt_file``; refuses the prompt of a rubric that no judge has."""
    if config.prompt_file is None:
        return own_prompts.NONE
    own = own_prompts.read(config.prompt_file, _render, "configs/judge.py")
    rubrics = [config[name].rubric for name in judges]
    used = [grounding.RUBRICS.get(rubric) or (prompts.PROMPTS[rubric],) for rubric in rubrics]
    names = {prompt.name for group in used for prompt in group}
    unused = [name for name in own if name not in names]
    if unused:
        raise UserError(f"{config.prompt_file}: [{unused[0]}] is not the rubric of a judge.")
    return own


def _evaluate(config: Config, workdir: pathlib.Path, judges: Sequence[str]) -> dict[str, Any]:
    runs = comparison.read_runs(comparison.named_folders(config.runs))
    ids = list(runs[0].records)
    run_answers = [_run_answers(config, run, ids) for run in runs]
    jobs = {name: [_jobs(config, name, run) for run in run_answers] for name in judges}

    # ---- Verdicts --------------------------------------------------------------------------------
    def programs(name: str) -> tuple[list[Job], dict[str, Any]]:
        unique = {job.id: job for row in jobs[name] for job in row if job is not None}
        settings = {"max_tokens": config.max_tokens, "retries": config.retries}
        if own := own_prompts.current():
            settings["prompt_file"] = own_prompts.digest(own)
        return list(unique.values()), {**settings, "rubric": config[name].rubric}

    models = {
        name: evaluation.Model(config[name], {}, schemas=config[name].constrained)
        for name in judges
    }
    results = evaluation.ask_models(
        config, workdir, models, {JUDGE: config.max_tokens}, programs, "answer"
    )
    verdicts: dict[str, list[list[float | None]]] = {}
    descriptions: dict[str, dict[str, Any]] = {}
    for name, (records, usage) in results.items():
        block = config[name]
        descriptions[name] = {"rubric": block.rubric, "model": backends.model_name(block)}
        if records is not None:
            by_job = {i: record.result(Verdict) for i, record in records.items()}
            if block.rubric == grounding.RELEVANCY:
                _add_relevancy(config, by_job, jobs[name], run_answers)
            verdicts[name] = [
                _verdicts(block.rubric, by_job, *pair)
                for pair in zip(jobs[name], run_answers, strict=True)
            ]
            descriptions[name] |= _counts(by_job.values())
            if block.rubric == grounding.FAITHFULNESS:
                descriptions[name]["without_evidence"] = _count_without_evidence(run_answers)
        descriptions[name] |= usage

    # ---- Scores ----------------------------------------------------------------------------------
    scores = {
        run.name: {
            **{name: mean_of(rows[i]) for name, rows in verdicts.items()},
            **_other_metrics(run, config.profile),
        }
        for i, run in enumerate(run_answers)
    }
    systems = {
        run.name: evaluation.System(
            scores[run.name], {}, _rows(run, {name: row[i] for name, row in verdicts.items()})
        )
        for i, run in enumerate(run_answers)
    }
    facts = {
        "agreement": _agreement(run_answers, verdicts)
        if len(verdicts) == 2 and all(config[name].rubric in prompts.RUBRICS for name in judges)
        else None,
        "judges": descriptions,
        "num_questions": len(ids),
        "without_gold": sum(not question.answers for question, _ in run_answers[0].answered),
        "empty": sum(text == "" for run in run_answers for text in run.texts),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            **{name: config[name] for name in ("text", "profile", "bootstrap_samples", "seed")},
            "encoder": config.encoder.model,
        },
        "complete": len(verdicts) == len(judges),
    }
    differences = pairwise_scores(scores, config.bootstrap_samples, config.seed)
    return evaluation.report(config, workdir, systems, facts, table_of, FILE, differences)


def _judges(config: Config) -> tuple[str, ...]:
    """Checks the config and returns the names of the judges."""
    judges = (JUDGE, SECOND) if config.second.run else (JUDGE,)
    check_choice("config.text", config.text, TEXTS)
    check_at_least(1, config, "max_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "retries")
    answers.check_profile(config.profile)
    for name in judges:
        check_choice(f"config.{name}.rubric", config[name].rubric, RUBRICS)
        if config[name].constrained:
            setting = f"config.{name}.constrained=true"
            backends.check_abilities(config, name, ("json_schema",), setting)
    blocks = [config[name] for name in judges]
    identities = [(block.rubric, identity.of_language_model(block)) for block in blocks]
    if identities[1:] == identities[:1]:
        raise UserError(
            "config.second has the same model and rubric as config.judge; change one of them."
        )
    return judges


def _run_answers(config: Config, run: comparison.FinishedRun, ids: Sequence[str]) -> RunAnswers:
    answered = [comparison.answered_of(run.records[i]) for i in ids]
    texts: list[str] = []
    for _, prediction in answered:
        text = ""
        if prediction is not None:
            text = prediction.answer if config.text == "answer" else raw(prediction)
        texts.append(text.strip())
    return RunAnswers(run.name, answered, texts)


def judge(
    messages: tuple[Message, ...], rubric: str, constrained: bool, retries: int
) -> Program[Verdict]:
    """Requests a verdict on one answer from the role ``judge``; retries malformed outputs."""
    schema = prompts.verdict_schema(rubric) if constrained else None
    prompt, problems, verdict = messages, list[str](), None
    for _ in range(retries + 1):
        response: Generated = yield Generate(prompt, JUDGE, json_schema=schema)
        truncated = response.finish_reason == "length"
        verdict, errors = prompts.parse_verdict(response.text, rubric, truncated=truncated)
        problems += errors
        if verdict is not None:
            break
        prompt = prompts.ask_again(messages, response.text, rubric)
    return {"right": verdict, "parse_errors": problems}


def _jobs(config: Config, name: str, run: RunAnswers) -> list[Job | None]:
    """Returns a judge's job for each answer of a run; None if there is nothing to judge."""
    return [
        _job(config, name, answered, text) if text else None
        for answered, text in zip(run.answered, run.texts, strict=True)
    ]


def _verdicts(
    rubric: str,
    by_job: Mapping[str, Verdict | None],
    jobs: Sequence[Job | None],
    run: RunAnswers,
) -> list[float | None]:
    """Returns a judge's verdict on each answer of a run, or None.

    An empty answer is wrong or irrelevant, but has no statements whose faithfulness could be
    judged.
    """
    verdicts: list[float | None] = []
    for job, (question, _), text in zip(jobs, run.answered, run.texts, strict=True):
        verdict = by_job[job.id] if job else None
        if text:
            verdicts.append(verdict["right"] if verdict else None)
        elif rubric in prompts.RUBRICS:
            verdicts.append(False if question.answers else None)
        else:
            verdicts.append(0.0 if rubric == grounding.RELEVANCY else None)
    return verdicts


def _count_without_evidence(runs: Sequence[RunAnswers]) -> int:
    """Returns the number of answers, of all runs, that were not read from evidence."""
    return sum(
        bool(text) and not (prediction and evidence_of(prediction))
        for run in runs
        for text, (_, prediction) in zip(run.texts, run.answered, strict=True)
    )


def _add_relevancy(
    config: Config,
    by_job: Mapping[str, Verdict | None],
    jobs: Sequence[Sequence[Job | None]],
    runs: Sequence[RunAnswers],
) -> None:
    """Sets the score of verdicts with questions: their mean cosine with the answered question."""
    asked = {
        job.id: question.question
        for row, run in zip(jobs, runs, strict=True)
        for job, (question, _) in zip(row, run.answered, strict=True)
        if job is not None
    }
    scored = [(i, v) for i, v in by_job.items() if v is not None and "questions" in v]
    pairs = [(asked[i], text) for i, verdict in scored for text in verdict["questions"]]
    if not pairs:
        return
    cosines = iter(evaluation.similarity(config.encoder)(pairs))
    for _, verdict in scored:
        values = [float(next(cosines)) for _ in verdict["questions"]]
        verdict["right"] = sum(values) / len(values)


def _job(config: Config, name: str, answered: AnsweredQuestion, text: str) -> Job | None:
    """Returns the job for one answer, or None if it lacks what the rubric needs.

    The id of a job is a hash of the messages and settings.
    """
    block, (question, prediction) = config[name], answered
    settings = (block.constrained, config.retries)
    program: Callable[[], Program[Verdict]]
    if block.rubric == grounding.FAITHFULNESS:
        evidence = evidence_of(prediction) if prediction else ()
        if not evidence:
            return None
        inputs: list[Any] = [question.question, text, list(evidence)]
        messages = grounding.statement_messages(question.question, text)
        program = functools.partial(
            grounding.faithfulness, question.question, text, evidence, *settings
        )
    elif block.rubric == grounding.RELEVANCY:
        inputs = [question.question, text]  # The score of equal answers depends on the question.
        messages = grounding.question_messages(text)
        program = functools.partial(grounding.relevancy, text, *settings)
    elif question.answers:
        inputs = []
        messages = prompts.judge_messages(question.question, text, question.answers, block.rubric)
        program = functools.partial(judge, messages, block.rubric, *settings)
    else:
        return None
    turns = [[message.role, message.text] for message in messages]
    key = codec.digest(codec.dump([[*turns, *inputs], (block.rubric, *settings)]))
    own = own_prompts.current()
    return Job(key, turns, lambda: own_prompts.run_with(own, program()))


def _counts(results: Collection[Verdict | None]) -> dict[str, Any]:
    verdicts = [verdict for verdict in results if verdict is not None]
    errors = collections.Counter(kind for verdict in verdicts for kind in verdict["parse_errors"])
    return {
        "verdicts": len(results),
        "unjudged": sum(verdict["right"] is None for verdict in verdicts),
        "failures": len(results) - len(verdicts),
        "parse_errors": dict(sorted(errors.items())),
    }


def _other_metrics(run: RunAnswers, profile: str) -> dict[str, Ratio]:
    """Computes `OTHER_METRICS` of the judged texts."""
    return {
        name: mean_of(
            [
                answers.METRICS[name](text, answers.golds_of(question, profile), profile)
                if question.answers
                else None
                for (question, _), text in zip(run.answered, run.texts, strict=True)
            ]
        )
        for name in OTHER_METRICS
    }


def _agreement(
    runs: Sequence[RunAnswers], verdicts: Mapping[str, Sequence[Sequence[float | None]]]
) -> dict[str, Any]:
    """Compares the two judges on the distinct answers, of all runs, that both have judged."""
    pairs: dict[tuple[str, str], tuple[bool, bool]] = {}
    for run, *rows in zip(runs, *verdicts.values(), strict=True):
        for (question, _), text, *both in zip(run.answered, run.texts, *rows, strict=True):
            if text and None not in both:
                pairs[question.id, text] = (bool(both[0]), bool(both[1]))
    first, second = zip(*pairs.values(), strict=True) if pairs else ((), ())
    return agreement(first, second)


def _rows(run: RunAnswers, verdicts: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    return [
        {
            "id": question.id,
            "system": run.name,
            "question": question.question,
            "gold": question.answers,
            "judged": text,
            "answer": prediction.answer if prediction else "",
            **{name: row[i] for name, row in verdicts.items()},
        }
        for i, ((question, prediction), text) in enumerate(
            zip(run.answered, run.texts, strict=True)
        )
    ]


def table_of(result: Mapping[str, Any]) -> str:
    """Formats scores in per cent, one row per run, the differences and the judges' agreement."""
    columns = [Column(f"{name} [95 %]", name, percent_with_bounds) for name in result["judges"]]
    columns += [Column("EM", "em"), Column("Acc", "acc")]
    rows = system_rows("answers of", columns, result)
    descriptions = (
        f"{name}: {judge['model']}, rubric {judge['rubric']}"
        + (f", {judge['unjudged']} without a verdict" if judge.get("unjudged") else "")
        + (f", {n} answers without evidence" if (n := judge.get("without_evidence")) else "")
        for name, judge in result["judges"].items()
    )
    caption = f"{result['num_questions']} questions; {'; '.join(descriptions)}"
    table = captioned(caption, rows, result["complete"])
    both = result["agreement"]
    if both is None:
        return table
    agree = "n/a" if both["agree"] is None else f"{100 * both['agree']:.1f} %"
    kappa = f"n/a ({both['reason']})" if both["kappa"] is None else f"{both['kappa']:.2f}"
    return (
        f"{table}\n\nThe judges agree on {agree} of {both['num_answers']} answers, "
        f"Cohen's kappa {kappa}."
    )
