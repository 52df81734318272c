"""The tables of a comparison of methods."""

from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.evaluation import hops, metrics
from cirag_jax.reports.tables import COMPLETE_AT, RECALL_AT, Table, lead, percent
from cirag_jax.types import GRANULARITIES

OUTCOMES = ("answered", "refused", "failed")
_MOST_SHOWN = 10  # Larger numbers of steps and queries share a column.
_GRAPH_COUNTS = ("questions", "passages", "entities", "relations", "triples")
_FIRST = ("f1", "em", "acc")  # the leftmost score columns
_MOST_KINDS = 3  # kinds of parse errors in a cell


def tables(result: Mapping[str, Any]) -> dict[str, Table]:
    """Returns the nonempty tables by heading."""
    by_heading = {
        "Scores": _scores(result),
        "Outcomes": _outcomes(result),
        "Differences": _differences(result),
        "Recall by step": _by_step(result),
        "Hops": _hops(result),
        "Robustness": _robustness(result),
        "Stages": _stages(result),
        "Iterations and queries": _histograms(result),
        "Graphs": _graphs(result),
        "Language models": _cost(result),
        "Time": _time(result),
    }
    return {heading: table for heading, table in by_heading.items() if len(table.rows) > 1}


def _columns(result: Mapping[str, Any]) -> list[str]:
    """Returns the scores that at least one run has.

    Of the ranking scores, only complete@K at the largest K is a column.
    """
    systems = result["systems"].values()
    hidden = {*_hop_names(result), *_ranking_names(result)[:-1]}
    names = [name for name in result["scores"] if name not in hidden]
    ordered = dict.fromkeys((*(name for name in _FIRST if name in names), *names))
    return [name for name in ordered if any(percent(system.get(name)) for system in systems)]


def _hop_names(result: Mapping[str, Any]) -> list[str]:
    return [name for name in result["scores"] if name.partition("@")[0] in hops.TITLES]


def _ranking_names(result: Mapping[str, Any]) -> list[str]:
    """Returns the names of the ranking scores; complete@K at the largest K is the last."""
    names = [name for name in result["scores"] if name.partition("@")[0] in metrics.RANKING_TITLES]
    return sorted(
        names, key=lambda name: (name.startswith("complete"), int(name.partition("@")[2] or 0))
    )


def run_label(name: str, system: Mapping[str, Any]) -> str:
    """Returns the name of a run with its marks."""
    return f"{name}{' *' * system['sees_gold']}{'' if system['is_ranked'] else ' †'}"


def _scores(result: Mapping[str, Any]) -> Table:
    """Returns a row per run, in per cent, with intervals for F1 and for recall at the largest K.

    The rows of runs that are not ranked are last.
    """
    columns, systems = _columns(result), result["systems"]
    wide = {"f1", next((name for name in reversed(columns) if name.startswith("recall@")), "")}
    header = ["run", *(f"{metrics.title(c)}{' [95 %]' * (c in wide)}" for c in columns)]
    rows = []
    for name, system in sorted(systems.items(), key=lambda item: not item[1]["is_ranked"]):
        scores = [percent(system.get(c), bounds=c in wide) or "n/a" for c in columns]
        total = max(sum(system["granularities"].values()), 1)
        shares = [
            f"{100 * system['granularities'][granularity] / total:.0f} %"
            for granularity in GRANULARITIES
        ]
        rows.append([run_label(name, system), *scores, *shares])
    caption = (
        f"{result['num_questions']} questions, {result['num_annotated']} with gold passages; "
        "scores in per cent; a failed question has score 0; shares of answers from triples, "
        "sentences, passages and by default"
    )
    if any(system["sees_gold"] for system in systems.values()):
        caption += "; * uses gold annotations"
    rates = [
        f"{name} (parse rate {percent(system['parse_rate'])} %)"
        for name, system in systems.items()
        if not system["is_ranked"]
    ]
    if rates:
        caption += (
            "; † not ranked, because the language models cannot follow the method and at least "
            f"half of their responses were malformed: {', '.join(rates)}"
        )
    if any("recall@" in name for name in columns):
        caption += f"; {RECALL_AT}, likewise for sentences and triples"
    if any(name.startswith("complete@") for name in columns):
        caption += f"; {COMPLETE_AT}"
    if any(name.startswith("hit@") for name in columns):
        caption += "; hit@K: share of questions with an answer in any of the first K passages"
    caption += _missing(result, columns)
    repeats = []
    for name, system in systems.items():
        std, count = system["repeats"]["std"], system["repeats"]["count"]
        if count > 1:
            spread = f" F1 ± {100 * std['f1']:.1f}" if "f1" in std else ""
            repeats.append(f"{name}{spread} over {count}")
    if repeats:
        caption += "; means over runs with different seeds: " + ", ".join(repeats)
    return Table(caption, [[*header, *GRANULARITIES], *rows])


def _outcomes(result: Mapping[str, Any]) -> Table:
    rows = [["run", *OUTCOMES, "parse rate [95 %]", "parse errors", "prompt tokens", "new tokens"]]
    for name, system in result["systems"].items():
        shares = [f"{100 * system['outcomes'][outcome]:.1f}" for outcome in OUTCOMES]
        rate = percent(system["parse_rate"], bounds=True) or "n/a"
        counts = list(system["parse_errors"].items())
        errors = ", ".join(f"{kind} {count:.2f}" for kind, count in counts[:_MOST_KINDS])
        errors += f", {len(counts) - _MOST_KINDS} more" if len(counts) > _MOST_KINDS else ""
        tokens = [f"{tokens_of(system, kind):,.0f}" for kind in ("prompt", "generated")]
        rows.append([run_label(name, system), *shares, rate, errors, *tokens])
    return Table(
        "Shares of questions in per cent: answered, refused (or without an answer) and failed; "
        "parse rate: share of responses that were not malformed, in per cent; parse errors of all "
        "kinds, most frequent first, and tokens: means per question",
        rows,
    )


def tokens_of(system: Mapping[str, Any], *kinds: str) -> float:
    """Returns the mean tokens of a question over all roles."""
    return sum(role[f"{kind}_tokens"] for role in system["roles"].values() for kind in kinds)


def _missing(result: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Returns the reasons for the missing scores of each run, as the end of a caption."""
    columns_of: dict[tuple[str, str], list[str]] = {}
    for name, system in result["systems"].items():
        for column in columns:
            if reason := system[column].get("reason"):
                columns_of.setdefault((name, reason), []).append(metrics.title(column))
    return "".join(
        f"; n/a for {name}: {reason} ({', '.join(titles)})"
        for (name, reason), titles in columns_of.items()
    )


def _differences(result: Mapping[str, Any]) -> Table:
    columns = [
        name
        for name in _columns(result)
        if any(name in scores for scores in result["differences"].values())
    ]
    rows = [["first - second", *map(metrics.title, columns)]]
    for name, scores in result["differences"].items():
        rows.append([name, *(_tested(scores.get(column)) or "n/a" for column in columns)])
    return Table(
        "Differences in points with 95 % intervals (paired bootstrap) and p (permutation test, "
        "corrected by Holm's method over the pairs in a column)",
        rows,
    )


def _tested(difference: Mapping[str, float] | None) -> str:
    text = lead(difference)
    if not text or not difference:
        return ""
    p = difference["p_holm"]
    return f"{text} p<0.001" if p < 0.001 else f"{text} p={p:.3f}"


def stepwise(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns names and recalls of the runs that retrieve; empty if no run has a second step."""
    runs = [(name, s["recall_by_step"]) for name, s in result["systems"].items()]
    has_steps = any(len(recalls) > 1 for _, recalls in runs)
    return [(name, recalls) for name, recalls in runs if recalls and has_steps]


def _by_step(result: Mapping[str, Any]) -> Table:
    runs = stepwise(result)
    most = max((len(recalls) for _, recalls in runs), default=0)
    rows = [["run", *(f"step {step}" for step in range(1, most + 1))]]
    for name, recalls in runs:
        cells = [percent(recall, bounds=True) for recall in recalls]
        rows.append([run_label(name, result["systems"][name]), *cells, *[""] * (most - len(cells))])
    return Table(
        "Recall over all steps so far (share of the gold passages), in per cent with 95 % "
        "intervals; questions with fewer steps keep their last value",
        rows,
    )


def _hops(result: Mapping[str, Any]) -> Table:
    """Returns a row per run with the family ``hops``; columns that no run has are left out."""
    names, systems = _hop_names(result), result["systems"]
    columns = [name for name in names if any(percent(s[name]) for s in systems.values())]
    rows = [["run", *map(metrics.title, columns)]]
    if names:
        for name, system in systems.items():
            cells = [percent(system[column], bounds=True) or "n/a" for column in columns]
            rows.append([run_label(name, system), *cells])
    return Table(
        "Hops, in per cent with 95 % intervals; R@K: share of questions with the gold passage of "
        "this hop among the first K; share of its evidence that is not from gold passages; "
        "unknowns with a name, right names, and unknowns with a wrong name; constraints that match "
        f"no annotated hop, and plans with such a constraint{_missing(result, names)}",
        rows,
    )


def hop_recalls(result: Mapping[str, Any]) -> list[str]:
    """Returns the recalls of the hops, at the largest K, that at least one run has."""
    systems = result["systems"].values()
    names = [name for name in _hop_names(result) if "_recall@" in name]
    k = max((int(name.partition("@")[2]) for name in names), default=0)
    names = [name for name in names if name.endswith(f"_recall@{k}")]
    return [name for name in names if any(percent(system[name]) for system in systems)]


def _robustness(result: Mapping[str, Any]) -> Table:
    """Returns a row per curve and ratio of corrupted facts."""
    names = robustness_scores(result)
    rows = [["run", "corruption", "ratio", *map(metrics.title, names)]]
    for curve in result["robustness"]:
        for point in curve["points"]:
            system = result["systems"][point["run"]]
            cells = [percent(system[name], bounds=True) or "n/a" for name in names]
            label = run_label(point["run"], system)
            rows.append([label, curve["kind"], f"{100 * point['ratio']:g} %", *cells])
    return Table(
        "Runs that differ only in the corruption of their triples; scores in per cent with 95 % "
        "intervals; ratio: share of the facts around a question's entities that were changed",
        rows,
    )


def robustness_scores(result: Mapping[str, Any]) -> list[str]:
    """Returns the scores that are shown by ratio of corrupted facts."""
    return [name for name in ("em", "f1") if name in _columns(result)]


def _stages(result: Mapping[str, Any]) -> Table:
    titles = [metrics.ANSWER_TITLES[name] for name in metrics.STAGE_SCORES]
    kinds = ("at the stage", "alone, all questions", "alone, same questions", "difference")
    rows = [["stage", "alone", "questions", *(f"{t} {kind}" for t in titles for kind in kinds)]]
    for row in result["stages"]:
        cells = []
        for name in metrics.STAGE_SCORES:
            cells += [percent(row[name][kind], bounds=True) for kind in ("cascade", "all", "same")]
            cells.append(lead(row[name]["difference"]))
        label = f"{row['cascade']}, {row['stage']}"
        rows.append([label, row["single"], str(row["num_questions"]), *(c or "n/a" for c in cells)])
    return Table(
        "Stages of a cascade and runs of their granularity alone, in per cent with 95 % intervals",
        rows,
    )


def _histograms(result: Mapping[str, Any]) -> Table:
    """Returns the share of questions by number of steps, and by number of retrieval queries."""
    systems = result["systems"]
    most = max(
        (int(n) for s in systems.values() for counts in s["histograms"].values() for n in counts),
        default=0,
    )
    columns = range(min(most, _MOST_SHOWN) + 1)
    last = f"{_MOST_SHOWN}+" if most > _MOST_SHOWN else str(columns[-1])
    rows = [["run", "questions by", *map(str, columns[:-1]), last]]
    for name, system in systems.items():
        for kind, counts in system["histograms"].items():
            total = sum(counts.values())
            shares = [0.0] * len(columns)
            for number, count in counts.items():
                shares[min(int(number), columns[-1])] += 100 * count / total
            rows.append([name, kind, *(f"{share:.0f} %" for share in shares)])
    return Table("Shares of questions by number of steps, and of retrieval queries", rows)


def _graphs(result: Mapping[str, Any]) -> Table:
    rows = [["run", *_GRAPH_COUNTS]]
    for name, system in result["systems"].items():
        if "reason" not in system["graphs"]:
            rows.append([name, *(f"{system['graphs'][kind]:,}" for kind in _GRAPH_COUNTS)])
    return Table("Graphs of the questions, summed", rows)


def _cost(result: Mapping[str, Any]) -> Table:
    rows = [["run", "role", "stage", "calls", "prompt tokens", "of these cached", "new tokens"]]
    for name, system in result["systems"].items():
        for role, spent in system["roles"].items():
            tokens = (f"{spent[key]:,.0f}" for key in ("prompt_tokens", "cached_tokens"))
            new = f"{spent['generated_tokens']:,.0f}"
            rows.append([name, role, spent["stage"], f"{spent['calls']:.1f}", *tokens, new])
    return Table("Language models: means per question, by role", rows)


def _time(result: Mapping[str, Any]) -> Table:
    systems = result["systems"]
    caption = "Time: all questions concurrently, without loading"
    if not any(system["seconds_alone"] for system in systems.values()):
        rows = [[name, f"{system['seconds']:.2f}"] for name, system in systems.items()]
        caption += "; to measure latency, run launch/compare.py --config.latency_questions=5"
        return Table(caption, [["run", "s per question, together"], *rows])
    rows = [["run", "s per question, together", "s per question, alone [95 %]", "timed alone"]]
    for name, system in systems.items():
        alone = system["seconds_alone"]
        bounds = f"{alone['value']:.2f} [{alone['low']:.2f}, {alone['high']:.2f}]" if alone else ""
        count = str(alone["num_questions"]) if alone else ""
        rows.append([name, f"{system['seconds']:.2f}", bounds, count])
    caption += "; and alone, one question at a time without caches"
    return Table(caption, rows)
