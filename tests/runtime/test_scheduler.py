"""The scheduler: batches across programs, isolated failures, budgets, deadlines, replay."""

import contextlib
import dataclasses

import pytest

from cirag_jax.errors import UserError
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import Extract, Generate, Generated, Rank, RequestError, Retrieve
from cirag_jax.runtime.scheduler import Call, Job, Scheduler
from cirag_jax.runtime.store import Journal
from tests.runtime.recording import Killed, Recording, Streaming, passage, response_to, say

SETTINGS = {"method": "test"}


@pytest.fixture
def book(tmp_path):
    with Journal(tmp_path / "journal.sqlite", SETTINGS) as journal:
        yield journal


def two_reads(name):
    """Retrieves and generates twice."""
    response = yield Retrieve(name, 1)
    first = yield say(f"{name} {response.passages[0].id}")
    response = yield Retrieve(first.text, 1)
    last = yield say(response.passages[0].title)
    return last.text


def job(name, program=two_reads, *arguments):
    return Job(name, {"name": name}, lambda: program(name, *arguments))


def scheduler(journal, search, model, **fields):
    return Scheduler({Retrieve: search, Extract: search, "reader": model}, journal, **fields)


def test_programs_advance_together(book):
    log: list[tuple[str, int]] = []
    search = Recording(log=log, name="search")
    model = Recording(is_slow=True, log=log, name="model")
    run = scheduler(book, search, model)
    assert run.run([job(f"p{i}") for i in range(5)])
    assert log == [("search", 5), ("model", 5)] * 2
    expected = "reader: Title reader: p3 p300"
    assert book.outcomes()["p3"] == expected
    progress = run.progress
    assert (progress.total, progress.done, progress.failed, progress.replayed) == (5, 5, 0, 0)
    assert (progress.calls, progress.generated) == (20, 10)
    assert (progress.prompt_tokens, progress.generated_tokens) == (70, 30)


def test_fast_handlers_run_before_slow_ones(book):
    """A model call waits until the other program's searches are answered."""

    def ahead(name):
        yield say(name)

    def behind(name):
        for i in range(3):
            yield Retrieve(f"{name}{i}", 1)
        yield say(name)

    log: list[tuple[str, int]] = []
    search = Recording(log=log, name="search")
    model = Recording(is_slow=True, log=log, name="model")
    scheduler(book, search, model).run([job("a", ahead), job("b", behind)])
    assert log == [("search", 1)] * 3 + [("model", 2)]


def test_larger_group_runs_first(book):
    def one(name, request):
        yield request

    log: list[tuple[str, int]] = []
    one_handler, other = Recording(log=log, name="one"), Recording(log=log, name="other")
    jobs = [job("a", one, Retrieve("x", 1))]
    jobs += [job(f"b{i}", one, Extract((passage("y"),))) for i in range(3)]
    Scheduler({Retrieve: one_handler, Extract: other}, book).run(jobs)
    assert log == [("other", 3), ("one", 1)]


def test_roles_of_one_handler_share_a_batch(book):
    def ask(name, role):
        yield say(name, role)

    model, other = Recording(is_slow=True), Recording(is_slow=True)
    handlers = {"reader": model, "integrator": model, "judge": other}
    jobs = [job(role, ask, role) for role in ("reader", "judge", "integrator")]
    Scheduler(handlers, book).run(jobs)
    assert [[call.key.program for call in batch] for batch in model.batches] == [
        ["reader", "integrator"]
    ]
    assert len(other.batches) == 1


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_in_flight_limits_running_programs(book, in_flight):
    running, num_running = set(), []

    def watched(name):
        running.add(name)
        num_running.append(len(running))
        result = yield from two_reads(name)
        running.remove(name)
        return result

    search, model = Recording(), Recording(is_slow=True)
    jobs = [job(f"p{i}", watched) for i in range(5)]
    assert scheduler(book, search, model, in_flight=in_flight).run(jobs)
    assert max(num_running) == in_flight
    assert max(map(len, model.batches)) == in_flight
    assert list(book.outcomes()) == sorted(f"p{i}" for i in range(5))


def test_in_flight_zero_is_rejected(book):
    with pytest.raises(UserError, match="in_flight"):
        scheduler(book, Recording(), Recording(), in_flight=0)


def test_request_list_is_answered_in_order(book):
    def fans_out(name):
        empty = yield []
        responses = yield [Retrieve("x", 2), say("hello"), Retrieve("y", 1)]
        single = yield [say("alone")]
        return [empty, [type(f).__name__ for f in responses], responses[1].text, single[0].text]

    search, model = Recording(), Recording(is_slow=True)
    scheduler(book, search, model).run([job("a", fans_out)])
    names = ["Retrieved", "Generated", "Retrieved"]
    assert book.outcomes()["a"] == [[], names, "reader: hello", "reader: alone"]
    assert len(search.batches) == 1 and len(search.batches[0]) == 2
    keys = [call.key for batch in (*search.batches, *model.batches) for call in batch]
    assert keys == [RequestKey("a", *place) for place in ((1, 0), (1, 2), (1, 1), (2, 0))]


def test_records_have_the_order_of_jobs(book):
    names = ["z", "a", "m"]
    scheduler(book, Recording(), Recording(is_slow=True)).run([job(name) for name in names])
    assert [record.id for record in book.records()] == names
    record = next(iter(book.records()))
    assert record.input == {"name": "z"} and record.error is None and record.seconds > 0
    assert record.calls == {
        "retrieve": 2,
        "fetch": 0,
        "follow": 0,
        "extract": 0,
        "anchor": 0,
        "link": 0,
        "walk": 0,
        "rank": 0,
        "route": 0,
        "demonstrate": 0,
        "generate": 2,
        "score": 0,
    }
    assert record.usage.prompt_tokens == 14


def asks(name, *texts):
    """Generates for each text, and retrieves after each generation."""
    for text in texts:
        yield say(text)
        yield Retrieve(text, 1)
    return list(texts)


def test_streaming_program_continues_while_others_wait(book):
    search, model = Recording(), Streaming(rows=2)
    jobs = [job("slow", asks, "long"), job("quick", asks, "a", "b", "c")]
    assert scheduler(book, search, model).run(jobs)
    assert model.answered == ["a", "b", "c", "long"]
    assert [len(batch) for batch in model.batches] == [2, 1, 1]
    assert book.outcomes() == {"slow": ["long"], "quick": ["a", "b", "c"]}
    # A handler that accepts no more calls answers its batch before programs continue.
    plain = Recording(is_slow=True)
    scheduler(book, search, plain).run([job("s", asks, "long"), job("q", asks, "a", "b", "c")])
    assert [len(batch) for batch in plain.batches] == [2, 1, 1]
    assert [call.request.messages[-1].text for call in plain.batches[0]] == ["long", "a"]


def test_streaming_programs_start_while_others_wait(book):
    running, num_running = set(), []

    def watched(name, *texts):
        running.add(name)
        num_running.append(len(running))
        yield from asks(name, *texts)
        running.remove(name)
        return name

    model = Streaming(rows=2)
    jobs = [job("slow", watched, "long")] + [job(f"p{i}", watched, f"t{i}") for i in range(4)]
    run = scheduler(book, Recording(), model, in_flight=2)
    assert run.run(jobs)
    assert model.answered == ["t0", "t1", "t2", "t3", "long"]
    assert max(num_running) == 2 and len(model.batches) == 4
    assert (run.progress.done, run.progress.calls) == (5, 10)


def test_streaming_batches_fast_requests(book):
    """One search for all queries is cheaper than one search per query."""
    log: list[tuple[str, int]] = []
    search = Recording(log=log, name="search")
    jobs = [job(f"p{i}", asks, f"a{i}", f"b{i}") for i in range(6)]
    assert scheduler(book, search, Streaming(rows=2)).run(jobs)
    assert log[0] == ("search", 5)  # the sixth request is still with the model


def test_streaming_request_list_waits_for_all_responses(book):
    def fans_out(name):
        responses = yield [say("x"), Retrieve("r", 1), say("y"), say("z")]
        last = yield say("last")
        return [f.text for f in responses if isinstance(f, Generated)] + [last.text]

    model = Streaming(rows=2)
    assert scheduler(book, Recording(), model).run([job("a", fans_out)])
    assert book.outcomes() == {"a": [f"reader: {t}" for t in ("x", "y", "z", "last")]}
    assert model.answered == ["y", "z", "x", "last"]


def test_streaming_error_is_thrown_at_once(book):
    def careful(name):
        try:
            yield say("fails")
        except RequestError:
            answer = yield say("again")
            return answer.text

    refuse = lambda call: "no" if call.request.messages[-1].text == "fails" else None  # noqa: E731
    model = Streaming(refuse=refuse)
    assert scheduler(book, Recording(), model).run([job("slow", asks, "long"), job("a", careful)])
    assert model.answered == ["fails", "again", "long"]
    assert book.outcomes()["a"] == "reader: again"


def test_streaming_stops_after_deadline(book, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cirag_jax.runtime.scheduler.time.monotonic", lambda: now[0])

    def late(name):
        yield say("a")
        now[0] = 10.0
        yield say("b")
        return name

    model = Streaming(rows=2)
    jobs = [job("slow", asks, "long"), job("late", late), job("never", asks, "c")]
    assert scheduler(book, Recording(), model, in_flight=2).run(jobs, deadline=5.0) is False
    assert "c" not in model.answered and model.answered[-1] == "long"
    assert [record.id for record in book.records()] == ["slow", "late"]


def test_streaming_user_error_ends_the_run(book):
    def refused(name):
        yield say("a")
        raise UserError("the store is gone.")

    with pytest.raises(UserError, match="the store is gone"):
        jobs = [job("slow", asks, "long"), job("b", refused)]
        scheduler(book, Recording(), Streaming()).run(jobs)


def test_program_error_does_not_affect_others(book):
    def broken(name):
        yield Retrieve(name, 1)
        raise ZeroDivisionError("by zero\nof all things")

    failures = []
    run = scheduler(
        book, Recording(), Recording(is_slow=True), on_progress=lambda p: failures.append(p.failed)
    )
    assert run.run([job("a"), job("bad", broken), job("b")])
    records = {record.id: record for record in book.records()}
    assert records["bad"].error == "ZeroDivisionError: by zero of all things"
    assert records["bad"].outcome is None
    assert set(book.outcomes()) == {"a", "b"}
    assert (run.progress.done, run.progress.failed, failures[-1]) == (3, 1, 1)


def test_request_error_ends_only_its_program(book):
    model = Recording(
        is_slow=True, refuse=lambda call: "too  long\n" if call.key.program == "bad" else None
    )
    assert scheduler(book, Recording(), model).run([job("a"), job("bad"), job("b")])
    records = {record.id: record for record in book.records()}
    assert records["bad"].error == "too long"
    assert set(book.outcomes()) == {"a", "b"}


def test_error_with_surrogate_is_escaped(book):
    model = Recording(is_slow=True, refuse=lambda call: "half \ud800 a pair")
    scheduler(book, Recording(), model).run([job("a")])
    assert next(book.records()).error == "half \\ud800 a pair"


def test_error_without_text_names_its_type(book):
    model = Recording(is_slow=True, refuse=lambda call: "")
    scheduler(book, Recording(), model).run([job("a")])
    assert next(book.records()).error == "RequestError"


def test_request_error_is_thrown_into_the_program(book):
    def careful(name):
        try:
            yield [Retrieve("x", 1), say("fails"), say("fails too")]
        except RequestError as error:
            answer = yield say("again")
            return [str(error), answer.text]

    def refuse(call):
        text = call.request.messages[-1].text
        return f"no {text}" if text.startswith("fails") else None

    scheduler(book, Recording(), Recording(is_slow=True, refuse=refuse)).run([job("a", careful)])
    assert book.outcomes() == {"a": ["no fails", "reader: again"]}


def test_result_not_encodable_raises(book):
    def odd(name):
        yield Retrieve(name, 1)
        return {1, 2}

    with pytest.raises(TypeError):
        scheduler(book, Recording(), Recording()).run([job("a", odd)])


def test_user_error_ends_the_run(book):
    def refused(name):
        yield Retrieve(name, 1)
        raise UserError("the store is gone.")

    with pytest.raises(UserError, match="the store is gone"):
        scheduler(book, Recording(), Recording()).run([job("a", refused), job("b")])


def test_handler_unanswered_call_raises(book):
    class Forgetful(Recording):
        def __call__(self, calls, done):
            super().__call__(calls[:-1], done)

    with pytest.raises(RuntimeError, match="left 1 of 2 calls unanswered"):
        scheduler(book, Forgetful(), Recording()).run([job("a"), job("b")])


def test_handler_two_responses_raises(book):
    class Eager(Recording):
        def __call__(self, calls, done):
            super().__call__(calls, done)
            super().__call__(calls, done)

    with pytest.raises(KeyError):
        scheduler(book, Eager(), Recording()).run([job("a")])


def test_undeclared_request_is_rejected(book):
    def ranks(name):
        yield Rank(name, ("a",), 1, "passages")

    with pytest.raises(UserError, match=r"requests 'rankers\.passages', which its `needs` lack"):
        Scheduler({Retrieve: Recording()}, book).run([job("p", ranks)])


def test_duplicate_job_ids_raise(book):
    with pytest.raises(ValueError, match="two jobs"):
        scheduler(book, Recording(), Recording()).run([job("a"), job("a")])


def test_programs_are_closed_after_an_error(book):
    closed = []

    def watched(name):
        try:
            yield Retrieve(name, 1)
            if name == "bad":
                raise UserError("no.")
            yield say(name)
        finally:
            closed.append(name)

    programs = [
        watched(name) for name in ("a", "bad", "b")
    ]  # kept, so that they are not garbage-collected
    jobs = [Job(name, None, lambda p=p: p) for name, p in zip("abc", programs, strict=True)]
    with pytest.raises(UserError):
        scheduler(book, Recording(), Recording(is_slow=True)).run(jobs)
    assert sorted(closed) == ["a", "b", "bad"]


def test_exhausted_budget_leaves_programs_unfinished(tmp_path):
    path, jobs = tmp_path / "j.sqlite", [job(f"p{i}") for i in range(4)]
    with Journal(path, SETTINGS) as book:
        model = Recording(is_slow=True, budget=3)
        run = scheduler(book, Recording(), model, in_flight=2)
        assert run.run(jobs) is False
        assert not any(record.error for record in book.records())
        finished = set(book.outcomes())
        assert len(finished) < 4 and run.progress.failed == 0
        answered = sum(record.calls["generate"] for record in book.records())
        assert answered == 3  # errors after the budget is exhausted are not recorded
    with Journal(path, SETTINGS) as book:
        model = Recording(is_slow=True)
        assert scheduler(book, Recording(), model).run(jobs) is True
        assert set(book.outcomes()) == {f"p{i}" for i in range(4)}
        assert len(model.requests) == 8 - 3


def test_sufficient_budget_completes_the_run(book):
    model = Recording(is_slow=True, budget=8)
    assert scheduler(book, Recording(), model).run([job(f"p{i}") for i in range(4)])
    assert len(book.outcomes()) == 4


def test_deadline_starts_no_batch(book):
    model = Recording(is_slow=True)
    run = scheduler(book, Recording(), model)
    assert run.run([job("a")], deadline=0.0) is False
    assert not model.requests and list(book.records()) == []
    assert run.run([job("a")], deadline=float("inf")) is True
    assert run.run([job("a")], deadline=0.0) is True  # everything is finished


class Killing(Recording):
    """Simulates a kill after ``calls`` responses."""

    def __init__(self, calls: int, **fields):
        super().__init__(**fields)
        self.left = calls

    def __call__(self, calls, done):
        self.batches.append(list(calls))
        for index, call in enumerate(calls):
            if not self.left:
                raise Killed
            self.left -= 1
            done(index, response_to(call.request))


@pytest.mark.parametrize("calls", range(8))
def test_killed_run_repeats_no_request(tmp_path, calls):
    jobs = [job(f"p{i}") for i in range(4)]
    with Journal(tmp_path / "whole", SETTINGS) as book:
        scheduler(book, Recording(), Recording(is_slow=True)).run(jobs)
        expected = [(r.id, r.outcome, r.calls, r.usage) for r in book.records()]
    path = tmp_path / "cut"
    search, model = Recording(), Killing(calls, is_slow=True)
    with Journal(path, SETTINGS) as book, pytest.raises(Killed):
        scheduler(book, search, model).run(jobs)
    search2, model2 = Recording(), Recording(is_slow=True)
    with Journal(path, SETTINGS) as book:
        run = scheduler(book, search2, model2)
        assert run.run(jobs)
        assert [(r.id, r.outcome, r.calls, r.usage) for r in book.records()] == expected
    assert len(model2.requests) == 8 - calls
    assert len(search.requests) + len(search2.requests) == 8
    assert run.progress.replayed == calls + len(search.requests)


@pytest.mark.parametrize("lives", range(8))
@pytest.mark.parametrize("rows", [1, 3])
def test_streaming_killed_run_repeats_no_request(tmp_path, rows, lives):
    jobs = [job(f"p{i}") for i in range(4)]
    with Journal(tmp_path / "whole", SETTINGS) as book:
        scheduler(book, Recording(), Recording(is_slow=True)).run(jobs)
        expected = [(r.id, r.outcome, r.calls, r.usage) for r in book.records()]
    search, model = Recording(), Streaming(rows, lives)
    with Journal(tmp_path / "cut", SETTINGS) as book, pytest.raises(Killed):
        scheduler(book, search, model, in_flight=3).run(jobs)
    search2, model2 = Recording(), Streaming(rows)
    with Journal(tmp_path / "cut", SETTINGS) as book:
        assert scheduler(book, search2, model2, in_flight=3).run(jobs)
        assert [(r.id, r.outcome, r.calls, r.usage) for r in book.records()] == expected
    assert len(model.answered) == lives and len(model2.answered) == 8 - lives
    assert len(search.requests) + len(search2.requests) == 8


def test_finished_run_makes_no_requests(tmp_path):
    jobs = [job("a"), job("b")]
    with Journal(tmp_path / "j", SETTINGS) as book:
        scheduler(book, Recording(), Recording()).run(jobs)
    with Journal(tmp_path / "j", SETTINGS) as book:
        search = Recording()
        run = scheduler(book, search, search)
        assert run.run(jobs) and not search.batches and run.progress.done == 2


def test_failed_request_is_retried_by_next_run(tmp_path):
    refuse = lambda call: "busy" if call.key.ordinal == 3 else None  # noqa: E731
    with Journal(tmp_path / "j", SETTINGS) as book:
        scheduler(book, Recording(), Recording(is_slow=True, refuse=refuse)).run([job("a")])
        assert [r.error for r in book.records()] == ["busy"]
    search, model = Recording(), Recording(is_slow=True)
    with Journal(tmp_path / "j", SETTINGS) as book:
        assert scheduler(book, search, model).run([job("a")])
        record = next(book.records())
        assert record.error is None and record.outcome == "reader: Title reader: a a00"
        assert record.calls["generate"] == 2
    assert not search.batches and len(model.requests) == 1


def test_failed_program_replays_its_responses(tmp_path):
    broken = [True]

    def fragile(name):
        response = yield Retrieve(name, 1)
        if broken[0]:
            raise ValueError("a bug")
        return response.passages[0].id

    with Journal(tmp_path / "j", SETTINGS) as book:
        scheduler(book, Recording(), Recording()).run([job("a", fragile)])
        assert next(book.records()).error == "ValueError: a bug"
    broken[0] = False
    search = Recording()
    with Journal(tmp_path / "j", SETTINGS) as book:
        scheduler(book, search, Recording()).run([job("a", fragile)])
        assert book.outcomes() == {"a": "a0"} and not search.batches


def survivor(name):
    """Continues after a failed retrieval."""
    with contextlib.suppress(RequestError):
        yield Retrieve(name, 1)
    yield say("one")
    responses = yield [say("two"), say("three")]
    return [one.text for one in responses]


def test_last_recorded_error_is_retried(tmp_path):
    """Errors that the method handled are kept, as are other responses to the same request list."""
    with Journal(tmp_path / "j", SETTINGS) as book:
        book.open_program("a", 0, {"name": "a"})
        book.record(RequestKey("a", 0), Retrieve("a", 1), RequestError("no index"))
        book.record(RequestKey("a", 1), say("one"), response_to(say("one")))
        book.record(RequestKey("a", 2, 0), say("two"), response_to(say("two")))
        book.record(RequestKey("a", 2, 1), say("three"), RequestError("no connection"))
    search, model = Recording(), Recording(is_slow=True)
    with Journal(tmp_path / "j", SETTINGS) as book:
        assert scheduler(book, search, model).run([job("a", survivor)])
        assert book.outcomes() == {"a": ["reader: two", "reader: three"]}
    assert not search.batches and model.requests == [say("three")]


@pytest.mark.parametrize("model", [Recording(is_slow=True), Streaming()])
def test_response_is_recorded_before_program_receives_it(book, model):
    replayed = []

    def watching(name):
        request = say(name)
        yield request
        replayed.append(book.replay(RequestKey(name, 0), request))

    scheduler(book, Recording(), model).run([job("a", watching)])
    assert isinstance(replayed[0], Generated) and replayed[0].text == "reader: a"


def test_call_has_its_position(book):
    model = Recording(is_slow=True)
    scheduler(book, Recording(), model).run([job("a")])
    assert [call.key.ordinal for batch in model.batches for call in batch] == [1, 3]
    assert isinstance(model.batches[0][0], Call) and isinstance(model.requests[0], Generate)


def test_partial_result_is_recorded_with_its_error_and_retried(tmp_path):
    @dataclasses.dataclass
    class Partial:
        passages: list[str]
        error: str | None = None

    def reads(name):
        retrieved = yield Retrieve(name, 1)
        ids = [passage.id for passage in retrieved.passages]
        try:
            yield say("read")
        except RequestError as error:
            return Partial(ids, str(error))
        return Partial(ids)

    file = tmp_path / "journal.sqlite"
    search = Recording()
    down = Recording(is_slow=True, refuse=lambda call: "the server is down")
    with Journal(file, SETTINGS) as book:
        run = scheduler(book, search, down, encode=codec.encode)
        assert run.run([job("a", reads)]) and run.progress.failed == 1
        (record,) = book.records()
        assert record.error == "the server is down" and not record.has_succeeded
        assert record.outcome["passages"] and book.outcomes() == {}
        assert record.result(dict) is None and record.result(dict, partial=True) == record.outcome
    with Journal(file, SETTINGS) as book:  # This run is killed before the program ends.
        book.open_program("a", 0, record.input)
        (record,) = book.records()
        assert record.outcome is record.error is None
    with Journal(file, SETTINGS) as book:
        run = scheduler(book, search, Recording(is_slow=True), encode=codec.encode)
        assert run.run([job("a", reads)]) and run.progress.failed == 0
        (record,) = book.records()
        assert record.has_succeeded and record.outcome == book.outcomes()["a"]
    assert len(search.batches) == 1  # the search is not repeated
