import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from analysis.validate.command import main, text_of
from analysis.validate.published import Cloud, Curve, match, speed_cloud
from analysis.validate.rungs import RUNGS, Check, Report, Section, compare, failures, said, summarize
from profiles.recipes.sources import Shared
from sim.errors import InputError, exit_code_of


def test_a_check_has_the_keys_that_every_command_reports():
    keys = ["name", "predicted", "observed", "error", "bound", "unit", "holds"]
    assert [field.name for field in dataclasses.fields(Check)] == keys


@pytest.mark.parametrize(
    ("predicted", "observed", "bound", "error", "holds"),
    [
        (10.0, 8.0, None, 2.0, None),
        (10.0, 8.0, 2.0, 2.0, True),
        (8.0, 10.0, 1.9, -2.0, False),
        (None, 8.0, 2.0, None, False),
        (None, 8.0, None, None, None),
    ],
)
def test_compare(predicted, observed, bound, error, holds):
    check = compare("speed", predicted, observed, "tokens/s", bound)
    assert (check.error, check.holds) == (error, holds)


def test_a_summary_has_an_error_alone():
    check = summarize("median", np.float64(4.0), "%", 3.0)
    assert (check.predicted, check.observed, check.error, check.holds) == (None, None, 4.0, False)
    assert type(check.error) is float


def test_a_report_ends_with_the_bounds_that_are_missed():
    checks = (compare("near", 1.0, 1.0, "s", 0.1), compare("far", 2.0, 1.0, "s", 0.1), compare("free", 9.0, 1.0, "s"))
    report = Report((Section("One", said("some words"), checks),))
    assert text_of(report).splitlines() == [
        "One",
        "===",
        "some words",
        "",
        "1 of 2 bounds hold",
        "missed: far: +1 s (2, 1), bound 0.1",
    ]
    assert [check.name for check in failures(report.checks())] == ["far"]


def fake_rung(monkeypatch, check):
    rung = dataclasses.replace(RUNGS["paper"], name="fake", run=lambda _: Report((Section("S", (), (check,)),)))
    monkeypatch.setitem(RUNGS, "fake", rung)


@pytest.mark.parametrize(("bound", "code"), [(None, 0), (1.0, 0), (0.1, 1)])
def test_exit_code_and_json(monkeypatch, tmp_path, capsys, bound, code):
    fake_rung(monkeypatch, compare("a", 1.5, 1.0, "s", bound))
    options = ["fake", "--shared", str(tmp_path), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "a.json")]
    assert main(options) == code
    holds = None if bound is None else code == 0
    wanted = {"name": "a", "predicted": 1.5, "observed": 1.0, "error": 0.5, "bound": bound, "unit": "s", "holds": holds}
    assert json.loads((tmp_path / "a.json").read_text()) == [wanted]
    assert (tmp_path / "out").is_dir()
    assert capsys.readouterr().out.startswith("S\n=")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["papper"], "RUNG: unknown rung 'papper'; known: paper"),
        (["paper", "--jobs", "0"], "--jobs: expected at least 1 (got 0)"),
        (["paper", "--seed", "-1"], "--seed: expected at least 0 (got -1)"),
        (["paper", "--shared", "nowhere"], "nowhere: no such folder; --shared names the folder of reference data"),
        (["paper", "--shared", ".", "--json", "no/a.json"], "no: no such folder"),
        (["paper", "--shared", ".", "--out", "file"], "file: cannot write: file exists"),
    ],
)
def test_bad_options_are_said_in_one_line_with_code_2(monkeypatch, tmp_path, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert exit_code_of(lambda: main(options)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_reference_data_that_lacks_a_file_is_a_fault_of_the_input(tmp_path):
    with pytest.raises(InputError, match="--shared names the folder it is in"):
        main(["paper", "--shared", str(tmp_path), "--out", str(tmp_path / "out")])


# --------------------------------------------------------------------------------------------------------------- clouds


def test_a_cloud_keeps_the_bins_with_points_enough():
    columns = np.array([[1.0, 5.0, 50.0, 205.8, 230.0], *[[0.0] * 5] * 3, [90.0, 50.0, 49.0, 60.0, 90.0]])
    assert Cloud(*columns).dense().requests.tolist() == [5.0, 205.8]
    assert Cloud(*columns).dense(least=40).requests.tolist() == [5.0, 50.0, 205.8]


def test_requests_at_a_speed_are_the_most_that_get_it():
    bumpy = Curve(np.array([10.0, 20.0, 30.0, 40.0, 50.0]), np.array([100.0, 80.0, 90.0, 70.0, 60.0]))
    assert bumpy.requests_at(75.0) == pytest.approx(37.5)
    assert bumpy.requests_at(85.0) == pytest.approx(32.5)  # not the crossings at 17.5 and 25
    assert bumpy.requests_at(100.0) == 10.0
    assert bumpy.requests_at(101.0) is None
    assert bumpy.requests_at(59.0) is None


def test_matching_two_lines_of_known_crossings():
    requests = np.linspace(1.0, 300.0, 2000)
    slow, fast = Curve(requests, 1000 / (10 + requests)), Curve(requests, 1500 / (10 + requests))
    found = match(slow, fast, 10.0)
    assert found.requests == pytest.approx((90.0, 140.0), rel=1e-3)
    assert found.throughput_gain == pytest.approx(100 * (140 / 90 - 1), rel=1e-3)
    # 1500 R / (10 + R) = 900 at R = 15, where a user gets 60.
    assert found.speed_gain == pytest.approx(500.0, rel=1e-2)


def test_matching_outside_a_curve_gives_nothing():
    requests = np.array([1.0, 2.0])
    found = match(Curve(requests, np.array([9.0, 8.0])), Curve(requests, np.array([20.0, 19.0])), 8.5)
    assert found.requests == (pytest.approx(1.5), None)
    assert (found.throughput_gain, found.speed_gain) == (None, None)


def test_the_clouds_give_the_gains_that_the_reference_data_say(shared_dir):
    from analysis.validate.telemetry import read_seen

    shared = Shared(shared_dir)
    flash, pro = read_seen(shared, "V4-Flash"), read_seen(shared, "V4-Pro")
    gains = [
        flash.lenient.throughput_gain,
        flash.lenient.speed_gain,
        pro.lenient.throughput_gain,
        pro.lenient.speed_gain,
    ]
    assert np.round(gains).tolist() == [53, 62, 56, 57]
    assert speed_cloud(shared, "V4-Flash", "DSpark").dense().requests.size > 15
