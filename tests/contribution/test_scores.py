import json
import math
from pathlib import Path

import numpy as np
import pytest

from privfed.aggregation.gram import Gram
from privfed.contribution.cosine import Cgsv
from privfed.contribution.scores import Scores, ScoreStore


def rounds(count: int) -> list[Gram]:
    rng = np.random.default_rng(0)
    matrices = []
    for number in range(count):
        rows = rng.normal(size=(4, 5))
        names = tuple(f"c{index}" for index in range(number % 2, number % 2 + 4))  # not always the same clients
        matrices.append(Gram(names=names, size=5, products=(rows @ rows.T + (rows @ rows.T).T) / 2))
    return matrices


def test_a_run_that_was_restarted_after_every_round_has_the_scores_of_one_that_was_not(tmp_path: Path) -> None:
    rule = Cgsv()
    values: dict[str, float] = {}
    for matrix in rounds(6):
        values, _ = rule.step(values, matrix)
    for number, matrix in enumerate(rounds(6)):
        store = ScoreStore(tmp_path / "scores.json", rule=rule.name)  # as after a restart
        scores = store.load()
        after, _ = rule.step(scores.values, matrix)
        store.save(scores.after(number, after))
    kept = ScoreStore(tmp_path / "scores.json", rule=rule.name).load()
    assert dict(kept.values) == values  # to the last bit
    assert kept.rounds == (0, 1, 2, 3, 4, 5)


def test_a_round_is_never_counted_twice() -> None:
    scores = Scores(rule="r").after(0, {"a": 1.0}).after(3, {"a": 2.0})
    for number in (3, 0, 2):
        with pytest.raises(ValueError, match="ascending rounds"):
            scores.after(number, {"a": 3.0})


def test_no_client_is_forgotten() -> None:
    with pytest.raises(ValueError, match=r"missing \['a'\]"):
        Scores(rule="r").after(0, {"a": 1.0, "b": 2.0}).after(1, {"b": 2.0})


def test_a_crash_while_saving_leaves_the_old_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScoreStore(tmp_path / "scores.json", rule="r")
    store.save(Scores(rule="r").after(0, {"a": 1.0}))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store.save(Scores(rule="r").after(1, {"a": 2.0}))
    assert dict(store.load().values) == {"a": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    ScoreStore(tmp_path / "scores.json", rule="r").save(Scores(rule="r"))
    assert (tmp_path / "scores.json").stat().st_mode & 0o777 == 0o600


def test_nothing_stored_yet_is_a_run_that_begins(tmp_path: Path) -> None:
    assert ScoreStore(tmp_path / "scores.json", rule="r").load() == Scores(rule="r")


def test_scores_of_another_rule_are_refused(tmp_path: Path) -> None:
    ScoreStore(tmp_path / "scores.json", rule="r").save(Scores(rule="r"))
    with pytest.raises(ValueError, match="expected scores of other, got some of r"):
        ScoreStore(tmp_path / "scores.json", rule="other").load()
    with pytest.raises(ValueError, match="expected scores of other, got some of r"):
        ScoreStore(tmp_path / "new.json", rule="other").save(Scores(rule="r"))
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"privfed scores v0": {}}),
        json.dumps({"privfed scores v1": {"rule": "r", "rounds": [0]}}),
        json.dumps({"privfed scores v1": {"rule": "r", "rounds": [0], "values": {"a": "much"}}}),
        json.dumps({"privfed scores v1": {"rule": "r", "rounds": [0], "values": {"a": math.nan}}}),
        json.dumps({"privfed scores v1": {"rule": "r", "rounds": [1, 0], "values": {}}}),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "scores.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected|could not convert"):
        ScoreStore(path, rule="r").load()
    assert path.read_text(encoding="utf-8") == content


def test_scores_that_are_none_are_refused_and_scores_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="finite scores"):
        Scores(rule="r", values={"a": math.inf})
    with pytest.raises(TypeError):
        Scores(rule="r", values={"a": 1.0}).values["a"] = 2.0  # type: ignore[index]
