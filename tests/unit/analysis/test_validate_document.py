import dataclasses

import pytest

from analysis.validate import document, verdicts
from analysis.validate.closed_loop import Cell, build_engine
from analysis.validate.document import (
    DOCS,
    REPRODUCIBLE,
    check_part,
    checks_of,
    committed,
    differences,
    keep,
    main,
    page_of,
    read_parts,
    write_page,
)
from analysis.validate.kept import AGAIN, Runs, load_runs
from analysis.validate.rungs import RUNGS, Claim, Report, Section, Settings, compare, summarize
from profiles.recipes.serving import build_serving
from profiles.recipes.sources import Shared
from sim.errors import InputError
from sim.verify import Fixed
from tests.helpers.banks import made_bank, save_banks


def report():
    checks = (compare("near", 1.0, 1.0, "s", 0.1), summarize("far", 9.0, "%", 5.0))
    claim = Claim(13, "lossless", "exact", "exact", "enumeration", "holds here")
    return Report((Section("One", ("some words",), checks),), (), (claim,))


def test_a_page_is_what_was_printed_below_the_claims(tmp_path):
    keep(tmp_path, "paper", report(), 3)
    write_page(tmp_path)
    page = (tmp_path / "validation.md").read_text()
    assert "some words" in page
    assert "| [paper](#paper) | 1 of 2 |" in page
    assert "missed: far: +9 %, bound 5" in page
    assert page.count("| 13 | lossless | exact | exact | enumeration | holds here |") == 1
    assert page.index("| 13 |") < page.index("some words")
    assert page == page_of(read_parts(tmp_path))


def test_a_rung_that_is_reported_elsewhere_is_linked(tmp_path):
    keep(tmp_path, "lab", Report(()), 0)
    page = page_of(read_parts(tmp_path))
    assert "| [lab](lab/README.md) | none set |" in page
    assert "## lab" not in page


def test_differences_name_what_changed(tmp_path):
    keep(tmp_path, "paper", report(), 0)
    before = committed(tmp_path, "paper")["checks"]
    assert differences(before, checks_of(report())) == []
    moved = [dict(before[0], predicted=1.5), dict(before[1], name="new")]
    assert differences(before, moved) == [
        "far: committed, but no longer reported",
        "near: predicted is 1.5, committed 1.0",
        "new: not committed",
    ]


def test_a_check_says_which_number_and_which_claim_moved(tmp_path, monkeypatch, capsys):
    found = report()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(RUNGS, "paper", dataclasses.replace(RUNGS["paper"], run=lambda _: found))
    options = ["paper", "--docs", str(tmp_path), "--shared", str(tmp_path)]
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    assert "paper: the numbers are those committed" in capsys.readouterr().out
    found = Report(
        (Section("One", (), (compare("near", 1.05, 1.0, "s", 0.1), summarize("far", 9.0, "%", 5.0))),),
        (),
        (dataclasses.replace(found.claims[0], verdict="does not hold"),),
    )
    assert main([*options, "--check"]) == 1
    out = capsys.readouterr().out
    assert "paper: near: predicted is 1.05, committed 1.0" in out
    assert "paper: claim 13 is another" in out


def test_the_lab_is_kept_as_its_claims_and_judges(tmp_path, monkeypatch, capsys):
    laws = {"dspark": [0.8, 0.8, 0.8], "dflash": [0.7, 0.3, 0.1]}
    banks = {name: {"code": made_bank(means, seed=seed)} for seed, (name, means) in enumerate(laws.items())}
    (tmp_path / "measured").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("profiles.files.SHIPPED", tmp_path)
    monkeypatch.setattr("analysis.validate.lab.DOCS", tmp_path)
    options = ["lab", "--docs", str(tmp_path), "--shared", str(tmp_path)]
    with pytest.raises(InputError, match=r"measured: no bank was recorded yet: make lab"):
        main(options)
    save_banks(tmp_path / "measured", "toy_t1", banks)
    claims = tuple(Claim(n, "a claim", "-", "-", "table 1", "cannot be judged") for n in (5, 6))
    keep(tmp_path, "paper", dataclasses.replace(report(), claims=claims), 0)
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    eagle3, dflash = verdicts.judge_all(read_parts(tmp_path))
    assert eagle3.verdict == "cannot be judged"
    assert "make lab" in eagle3.why
    assert dflash.source == "lab"
    assert dflash.verdict in ("holds here", "holds in direction")
    assert f"| 6 | a claim | - | {dflash.ours} | lab |" in (tmp_path / "validation.md").read_text()
    capsys.readouterr()
    assert main([*options, "--claims"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"| a claim | - | {dflash.ours} | {dflash.verdict} |"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["papper"], "RUNG: unknown rung 'papper'; known: paper"),
        (["--docs", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        main(options)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"checks": 1}'])
def test_a_broken_file_of_checks_names_the_command(tmp_path, text):
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "paper.json").write_text(text)
    with pytest.raises(InputError, match=r"paper\.json: no checks to read .*analysis\.validate\.document paper"):
        committed(tmp_path, "paper")


# ----------------------------------------------------------------------------------------------------------- kept runs


@pytest.fixture(scope="module")
def cells(shared_dir):
    profile = build_serving(Shared(shared_dir), "V4-Flash")
    return [Cell(build_engine(profile, Fixed(k=5), load), load, 2_000, 32) for load in (2, 4, 8, 12, 16)]


@pytest.fixture(scope="module")
def table(cells, tmp_path_factory):
    runs = Runs()
    runs.run(cells, 1, "test")
    path = tmp_path_factory.mktemp("kept") / "runs.csv"
    runs.save(path)
    return path


def test_kept_runs_stand_for_what_was_simulated(cells, table):
    fresh = Runs().run(cells, 1, "test")
    runs = Runs(load_runs(table, "run it"))
    for one, other in zip(runs.run(cells, 1, "test"), fresh, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-8)
    assert runs.differ == []


def test_another_input_shows_though_nothing_is_simulated(cells, table):
    engine = cells[0].engine
    slower = dataclasses.replace(engine, cost=dataclasses.replace(engine.cost, verify_s=engine.cost.verify_s * 1.001))
    runs = Runs(load_runs(table, "run it"))
    runs.run([dataclasses.replace(cells[0], engine=slower), *cells[1:]], 1, "test")
    assert [line.split(" is ")[0] for line in runs.differ] == ["test, run 0: verify_s"]


def test_a_simulator_that_gives_something_else_shows_in_the_runs_done_again(cells, table, monkeypatch):
    from analysis.validate import kept

    honest = kept.run_cell
    monkeypatch.setattr(
        kept,
        "run_cell",
        lambda cell: dataclasses.replace(honest(cell), accepted_length=honest(cell).accepted_length + 0.1),
    )
    runs = Runs(load_runs(table, "run it"))
    runs.run(cells, 1, "test")
    assert len(runs.differ) == AGAIN
    assert all(": accepted_length is " in line for line in runs.differ)


def test_other_cells_than_were_kept_are_refused(cells, table):
    with pytest.raises(InputError, match="5 runs are kept of the 4 that are wanted"):
        Runs(load_runs(table, "run it")).run(cells[1:], 1, "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("policy,", "policies,", 1), r"runs\.csv:1: expected the columns group, run, policy"),
        (
            lambda text: text.replace(",2000,", ",many,", 1),
            r"runs\.csv:2: tokens: expected a number \(got 'many'\): run it",
        ),
        (lambda text: text[: text.rindex(",")], r"runs\.csv:6: batch_p90: expected a number \(got None\)"),
    ],
)
def test_a_broken_table_names_its_line(table, tmp_path, change, message):
    path = tmp_path / "runs.csv"
    path.write_text(change(table.read_text()))
    with pytest.raises(InputError, match=message):
        load_runs(path, "run it")


def test_a_table_that_is_absent_names_the_command(tmp_path):
    with pytest.raises(InputError, match=r"no runs to read .*: run it"):
        load_runs(tmp_path / "none.csv", "run it")


# ---------------------------------------------------------------------------------------------------- what is committed


def test_the_committed_page_is_that_of_the_committed_parts():
    parts = read_parts(DOCS)
    assert set(REPRODUCIBLE) <= set(parts)
    assert (DOCS / document.PAGE).read_text(encoding="utf-8") == page_of(parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_committed_numbers_are_those_of_the_code(name, shared_dir, tmp_path):
    """All numbers but for most of the closed loops of ``paper``, which take minutes to simulate."""
    settings = Settings(shared=Shared(shared_dir), out=tmp_path, draw=False)
    assert check_part(DOCS, name, settings, quick=True) == []
