"""The folder of a sweep: what is finished stays, what belongs to another sweep or is torn counts for nothing."""

import json
import math

import pytest

from sim.cell_store import MANIFEST, differences, open_store
from sim.cells import Cell, CellResult
from sim.errors import InputError
from sim.output import write_json

ASKED = {"scenario": {"seed": 1, "fleet": {"replicas": 4}}, "profiles": {"p": "00"}, "versions": {"numpy": "2"}}
CELL = Cell(1, 3, 2)
METRICS = {"a": 0.1 + 0.2, "b": None, "c": math.inf, "d": 7}


def result(cell=CELL):
    return CellResult(cell, METRICS, {}, {"read": 3}, ("mind",))


def test_a_result_reads_back_bit_by_bit(tmp_path):
    store = open_store(tmp_path / "s", ASKED, resume=False)
    store.save(result())
    assert store.load(CELL) == result()
    assert store.load(Cell(0, 3, 2)) is None
    assert open_store(tmp_path / "s", ASKED, resume=True).load(CELL) == result()
    assert not list((tmp_path / "s").rglob("*.part"))


def test_a_torn_file_and_one_of_another_sweep_count_for_nothing(tmp_path, caplog):
    store = open_store(tmp_path / "s", ASKED, resume=False)
    store.save(result())
    (path,) = (tmp_path / "s" / "cells").iterdir()
    whole = path.read_text()
    for spoiled in (whole[:50], "[]", "", whole.replace(store.digest, "f" * 64), '{"sweep": 1}'):
        path.write_text(spoiled)
        assert store.load(CELL) is None
        assert "its cell runs again" in caplog.text
        caplog.clear()


def test_resuming_something_else_says_what_differs(tmp_path):
    open_store(tmp_path / "s", ASKED, resume=False).save(result())
    other = json.loads(json.dumps(ASKED))
    other["scenario"]["fleet"]["replicas"] = 8
    other["profiles"]["p"] = "11"
    other["versions"]["numpy"] = "3"
    with pytest.raises(InputError) as error:
        open_store(tmp_path / "s", other, resume=True)
    assert str(error.value) == (
        f"{tmp_path}/s: cannot resume, it was begun with something else: fleet.replicas: 4, now 8; "
        "profiles.p: the file changed; versions.numpy: '2', now '3'"
    )


def test_differences_name_keys_that_came_and_went():
    assert list(differences({"scenario": {"a": 1}}, {"scenario": {"b": {"c": 2}}})) == [
        "a: 1, now not there",
        'b: was not there, now {"c": 2}',
    ]
    assert list(differences(ASKED, json.loads(json.dumps(ASKED)))) == []


def test_only_a_finished_sweep_gives_way(tmp_path):
    folder = tmp_path / "s"
    store = open_store(folder, ASKED, resume=False)
    store.save(result())
    with pytest.raises(InputError, match=r"holds an unfinished sweep \(1 cells are done\); --resume it, remove it or"):
        open_store(folder, ASKED, resume=False)
    write_json({"failed": [{"policy": "none"}]}, folder / MANIFEST)
    with pytest.raises(InputError, match="holds an unfinished sweep"):
        open_store(folder, ASKED, resume=False)
    assert store.load(CELL) == result()
    write_json({"failed": []}, folder / MANIFEST)
    assert open_store(folder, ASKED, resume=False).load(CELL) is None
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path, resume):
    (tmp_path / "s").mkdir()
    assert open_store(tmp_path / "s", ASKED, resume=resume)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(InputError, match="exists and is not a sweep's folder"):
        open_store(tmp_path / "mine", ASKED, resume=resume)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="exists and is not a sweep's folder"):
        open_store(tmp_path / "file", ASKED, resume=resume)
