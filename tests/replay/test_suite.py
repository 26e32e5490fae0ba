"""The suite of ``make bench``: its loads, how bars are judged, and that nothing runs twice."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import __main__ as suite
from benchmarks.suite import session as session_module
from benchmarks.suite.bars import FactBar, Limit, Measured, ReplayBar
from benchmarks.suite.facts import Script, ScriptFailed, busy_seconds, step_seconds
from benchmarks.suite.rows import LOADS, ROWS, Contender, Row, only_unlabelled
from benchmarks.suite.session import Measurement, Session
from tests.replay.fake_server import FakeServer
from tests.replay.test_measure import in_thread
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay import measure as measure_module
from vllm_thunder.replay.measure import NotDrained, empty_server
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.presets import preset
from vllm_thunder.replay.records import ProgramRecord, Replay, StepRecord
from vllm_thunder.replay.server import ServerFailed, ServerSpec

# -- loads and rows ---------------------------------------------------------------------


def test_the_traces_get_memory_for_a_third_of_them() -> None:
    for name in ("tau_airline", "sweagent"):
        for seed in range(3):
            load = LOADS[name](seed)
            assert len(load.programs) == 24
            assert load.pressure == pytest.approx(3.0, abs=0.05)


def test_memory_is_enough_where_a_row_says_so() -> None:
    for name in ("roomy", "shared"):
        assert LOADS[name](0).pressure < 0.6


def test_every_row_has_a_bar_that_names_its_contenders() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        labels = {contender.label for contender in row.contenders}
        assert row.bars
        for bar in row.bars:
            if isinstance(bar, ReplayBar):
                assert {bar.of, bar.over or bar.of} <= labels
            else:
                assert row.script is not None


def test_runs_are_told_apart_by_their_files(tmp_path: Path) -> None:
    contenders = {contender for row in ROWS for contender in row.contenders}
    assert len({Measurement(c, 0).path(tmp_path) for c in contenders}) == len(contenders)


def test_rows_of_one_kv_size_stand_together() -> None:
    sizes = [LOADS[c.load](0).blocks for row in ROWS for c in row.contenders]
    changes = sum(before != after for before, after in pairwise(sizes))
    assert changes + 1 == len(set(sizes))


def test_all_rows_fit_into_an_hour(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert suite.main(["--plan", "--work", str(tmp_path)]) == 0
    last = [line for line in capsys.readouterr().out.splitlines() if "│" in line][-1]
    assert float(last.split("│")[-2]) < 60


# -- bars ---------------------------------------------------------------------------------


def run(
    kind: str,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    steps: Sequence[StepRecord] = (),
    labelled: Sequence[bool] = (True, True),
) -> Replay:
    return Replay(
        kind,
        seconds=seconds,
        programs=[
            ProgramRecord(f"p{index}", name, 1, 1, ended_at=1.0)
            for index, name in enumerate(labelled)
        ],
        steps=list(steps) or [call("p0"), call("p1")],
        engine={"vllm:iteration_tokens_total_count": 4.0},
        about={"workload": {"seed": seed}},
    )


def call(program: str, started: float = 0.0, latency: float = 1.0, **values: Any) -> StepRecord:
    return StepRecord(program, 0, True, started, latency_seconds=latency, **values)


def speed(limit: Limit, **values: Any) -> ReplayBar:
    return ReplayBar("steps per minute", lambda s: s.steps_per_minute, limit, **values)


def test_a_bar_is_over_pooled_runs() -> None:
    measured = Measured(
        {
            "stock": [run("stock"), run("stock", seed=1, seconds=120.0)],
            "thunder": [run("thunder", seconds=30.0), run("thunder", seed=1, seconds=60.0)],
        },
        {},
    )
    verdict = speed(Limit(at_least=2.0), over="stock").judge(measured)
    assert verdict.figure == pytest.approx(2.0)
    assert verdict.met
    assert "as a multiple of stock's" in verdict.bar
    assert not speed(Limit(at_least=2.01), over="stock").judge(measured).met
    assert speed(Limit(at_most=2.7)).judge(measured).figure == pytest.approx(8 / 3)


def test_a_bar_for_every_run_takes_the_worst_seed() -> None:
    measured = Measured(
        {
            "stock": [run("stock"), run("stock", seed=1)],
            "thunder": [run("thunder", seconds=20.0), run("thunder", seed=1, seconds=66.0)],
        },
        {},
    )
    verdict = speed(Limit(at_least=1.0), over="stock", every_run=True).judge(measured)
    assert verdict.figure == pytest.approx(60 / 66)
    assert not verdict.met
    assert speed(Limit(at_least=1.0), over="stock").judge(measured).met


def test_what_nobody_told_is_missed() -> None:
    bar = ReplayBar("pauses", lambda s: s.pauses, Limit(at_most=0))
    verdict = bar.judge(Measured({"thunder": [run("thunder")]}, {}))
    assert (verdict.figure, verdict.met) == (None, False)
    every = replace(bar, every_run=True).judge(Measured({"thunder": [run("thunder")]}, {}))
    assert (every.figure, every.met) == (None, False)
    fact = FactBar("share", "share", Limit(at_most=0.01))
    assert not fact.judge(Measured({}, {})).met
    assert fact.judge(Measured({}, {"share": 0.01})).met
    assert not fact.judge(Measured({}, {"share": 0.011})).met


@pytest.mark.parametrize("sides", [{}, {"at_least": 1.0, "at_most": 2.0}])
def test_a_limit_has_one_side(sides: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="one side"):
        Limit(**sides)


def test_the_same_programs_are_judged_unlabelled_under_both_kinds() -> None:
    runs = {
        "stock": [run("stock", labelled=(False, False)), run("stock", labelled=(False, False))],
        "half": [run("half", labelled=(True, False)), run("half", labelled=(False, True))],
    }
    judged = only_unlabelled(runs)
    for label in runs:
        assert [[p.program_id for p in r.programs] for r in judged[label]] == [["p1"], ["p0"]]
        assert [[s.program_id for s in r.steps] for r in judged[label]] == [["p1"], ["p0"]]
        assert all(r.engine == {} for r in judged[label]), "they count the labelled ones too"


# -- facts --------------------------------------------------------------------------------


def test_busy_is_when_any_call_is_in_flight() -> None:
    calls = [call("a", 5.0, 1.0), call("b", 0.0, 2.0), call("c", 1.0, 0.5), call("d", 1.5, 2.0)]
    assert busy_seconds(calls) == pytest.approx(3.5 + 1.0)
    assert step_seconds([run("stock", steps=calls)]) == pytest.approx(4.5 / 4)
    silent = run("stock", steps=calls)
    silent.engine = {}
    assert step_seconds([silent]) is None


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A script that counts how often it runs; the text is what it does besides."""
    monkeypatch.setattr("benchmarks.suite.facts._BENCHMARKS", tmp_path)

    def write(text: str = "") -> Script:
        (tmp_path / "cost.py").write_text(
            "import json, pathlib, sys\n"
            "from vllm_thunder.replay.machine import describe_machine\n"
            f"{text}\n"
            "with open(pathlib.Path(__file__).with_name('ran'), 'a') as ran: ran.write('x')\n"
            "report = {'value': 3, 'machine': describe_machine()}\n"
            "pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps(report))\n"
        )
        return Script("cost.py", ("--fast",), 1.0, lambda report, _runs: {"x": report["value"]})

    return write


def test_a_script_runs_once(script, tmp_path: Path) -> None:
    work = tmp_path / "rows"
    work.mkdir()
    for _ in range(2):
        assert script().run({}, work) == {"x": 3}
    assert (tmp_path / "ran").read_text() == "x"
    report = json.loads((work / "cost.json").read_text())
    report["machine"]["commit"] = "another"
    (work / "cost.json").write_text(json.dumps(report))
    with pytest.raises(ConfigError, match="of commit another"):
        script().run({}, work)


def test_a_script_that_fails(script, tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed, match=r"cost\.py ended with status 3"):
        script("sys.exit(3)").run({}, tmp_path)


# -- an emptied server ----------------------------------------------------------------------


def test_a_server_is_emptied() -> None:
    server = FakeServer(busy_resets=2)
    server.requests = [{"program_id": "a"}, {"program_id": "b/c"}]
    with in_thread(server):
        empty_server(server.url, "thunder")
        assert sorted(server.released) == ["a", "b/c"]
        assert server.resets == 1
        empty_server(server.url, "stock")
        assert (len(server.released), server.resets) == (2, 2)


def test_a_server_that_cannot_be_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_DRAIN_SECONDS", 0.3)
    server = FakeServer(busy_resets=1000)
    with in_thread(server), pytest.raises(NotDrained, match="cannot be reset"):
        empty_server(server.url, "stock")
    with pytest.raises(NotDrained, match="POST http://"):
        empty_server("http://127.0.0.1:9", "stock")


# -- a whole run ------------------------------------------------------------------------------

STOCK = Contender("stock", "small", seconds=1)
THUNDER = Contender("thunder", "small", seconds=1)
LIMITED = Contender("stock@1", "small", seconds=1, most_programs=1)
HALF = Contender("thunder-half", "small", seconds=1, unlabelled_share=0.5)
KEEPS = Contender("thunder-keeps", "other size", seconds=1, release=False)
CUT = Contender("thunder-cut", "other size", seconds=1, window=0.05)
FAST = speed(Limit(at_least=0.0001), over="stock")
TEST_ROWS = (
    Row("plain", "all of it", (STOCK, THUNDER, LIMITED), (FAST,), seeds=(0, 1)),
    Row("half", "half of it", (STOCK, HALF), (speed(Limit(at_least=1e9), of="thunder-half"),)),
    Row("odd", "other clients", (KEEPS, CUT), (speed(Limit(at_least=0), of=CUT.label),), (0,)),
)


class FakeServers:
    """Stands for running_servers: a server a kind, each with what it was asked for."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int | None, tuple[str, ...]]] = []
        self.servers: list[tuple[ServerSpec, FakeServer]] = []
        self.up = 0
        self.fail: type[BaseException] | None = None

    @contextlib.contextmanager
    def running(self, asked: Sequence[tuple[ServerSpec, Path]]) -> Iterator[list[str]]:
        assert self.up == 0, "servers of two sizes at once"
        if self.fail is not None:
            raise self.fail("no server today")
        with contextlib.ExitStack() as stack:
            urls = []
            for spec, _log in asked:
                assert spec.dev_mode
                self.started.append((spec.kind, spec.usable_blocks, spec.extra))
                server = FakeServer(token_seconds=0.001)
                stack.enter_context(in_thread(server))
                self.servers.append((spec, server))
                urls.append(server.url)
            self.up = len(asked)
            try:
                yield urls
            finally:
                self.up = 0


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeServers:
    found = FakeServers()
    loads = {
        "small": lambda seed: preset("smoke", seed=seed, programs=4),
        "other size": lambda seed: preset("smoke", seed=seed, programs=2).resized(50),
    }
    monkeypatch.setattr(session_module, "LOADS", loads)
    monkeypatch.setattr(session_module, "running_servers", found.running)
    monkeypatch.setattr(suite, "ROWS", TEST_ROWS)
    monkeypatch.setattr(suite, "plot_replays", lambda *_: None)  # a second or two a picture
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return found


def bench(*arguments: str) -> int:
    return suite.main([*arguments, "--out", "out"])


def test_the_whole_suite(servers: FakeServers, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(suite, "plot_replays", plot_replays)
    assert bench("--thunder-arg=--thunder-max-wait=30") == 0
    flag = ("--thunder-max-wait=30",)
    assert servers.started == [
        *(("stock", 40, ()), ("thunder", 40, flag)),
        ("thunder", 50, flag),
    ], "a pair for a size, and only the kinds that are needed"
    runs = sorted(path.stem for path in (tmp_path / "results" / "bench").glob("*-seed?.json"))
    assert len(runs) == 2 * 3 + 1 + 3 + 2, "stock is measured once a seed for both rows"
    report = json.loads((tmp_path / "out" / "plain.json").read_text())
    assert [bar["met"] for bar in report["bars"]] == [True]
    assert [summary["kind"] for summary in report["summaries"]] == ["stock", "thunder", "stock@1"]
    assert report["machine"]["cores"] >= 1
    assert [r["kind"] for r in report["runs"]] == [
        *("stock", "thunder", "stock@1"),
        *("stock@1", "thunder", "stock"),
    ]
    assert all(r["worst_wait"] > 0 for r in report["runs"])
    assert (tmp_path / "out" / "plain.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "longest wait" in shown
    assert shown.count("MISSED") == 2, "after the row and in the end"

    (stock_spec, stock), (_, thunder), (_, other) = servers.servers
    assert stock_spec.kind == "stock"
    assert not any("program_id" in request for request in stock.requests)
    assert stock.resets == 2 * 5, "before and after each run"
    labelled = sum("program_id" in request for request in thunder.requests)
    assert labelled == 2 * 12 + 3 * 6, "half of the programs of the second row have no id"
    assert set(other.released) == {"chat-000", "chat-001"}
    cut = Replay.load(tmp_path / "results/bench/other size-thunder-cut-seed0.json")
    assert not cut.errors


def test_the_suite_goes_on_where_it_stopped(servers: FakeServers, capsys) -> None:
    assert bench("plain", "--seeds", "0") == 0
    assert bench("plain") == 0
    first, second = servers.servers[0][1], servers.servers[2][1]
    assert len(first.requests) == len(second.requests) == 2 * 12
    assert bench("plain") == 0
    assert len(servers.started) == 4, "nothing is left to be measured"
    capsys.readouterr()
    assert bench("plain", "--thunder-arg=--x") == 2
    assert "measured otherwise (thunder_arguments): use --fresh" in capsys.readouterr().err
    assert bench("plain", "--thunder-arg=--x", "--fresh") == 0
    assert len(servers.started) == 6


def test_a_run_of_another_load_is_not_taken_for_this_one(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    assert bench("plain", "--seeds", "0") == 0
    monkeypatch.setitem(session_module.LOADS, "small", lambda seed: preset("smoke", seed=seed))
    assert bench("plain", "--seeds", "0") == 2
    assert "measured otherwise (load)" in capsys.readouterr().err


def test_a_row_that_fails_stops_no_other(servers: FakeServers, capsys, monkeypatch) -> None:
    real = session_module.measure_on

    def measure_on(url: str, spec: ServerSpec, *args: Any, label: str, **values: Any) -> Replay:
        if label == "stock@1":
            raise NotDrained("programs: 3")
        return real(url, spec, *args, label=label, **values)

    monkeypatch.setattr(session_module, "measure_on", measure_on)
    assert bench() == 1
    shown = capsys.readouterr().out
    assert "plain: programs: 3" in shown
    assert Path("out/half.json").is_file()
    assert not Path("out/plain.json").exists()
    assert [kind for kind, *_ in servers.started] == ["stock", "thunder"] * 2 + ["thunder"], (
        "what comes after a failure gets new servers"
    )


def test_servers_that_do_not_start(servers: FakeServers, capsys) -> None:
    servers.fail = ServerFailed
    assert bench("plain") == 1
    assert "plain: no server today" in capsys.readouterr().out


def test_a_row_has_to_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        suite.main(["thrush"])
    assert left.value.code == 2
    assert "'thrush' is not a row" in capsys.readouterr().err


def test_a_session_stops_its_servers_when_it_is_left(servers: FakeServers, tmp_path: Path) -> None:
    measurement = Measurement(STOCK, 0)

    def session_that_is_interrupted() -> None:
        with Session(tmp_path / "work", [measurement], suite.Console(quiet=True)) as session:
            session.run(measurement)
            assert servers.up == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session_that_is_interrupted()
    assert servers.up == 0
