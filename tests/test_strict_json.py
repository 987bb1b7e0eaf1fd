import json

import pytest

from privfed.strict_json import canonical, checksum, parse, real, whole


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 1}',
        '[{"b": {"a": 1, "a": 2}}]',
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        "[1e999]",
        "[-1e999]",
        "",
        "{'a': 1}",
        "1 2",
    ],
)
def test_what_two_readers_may_take_for_two_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting|Extra"):
        parse(text)


def test_everything_else_is_read_as_json_reads_it() -> None:
    text = '{"a": [1, 2.5, -1e-300, null, true, "x"], "b": {"a": {}}}'
    assert parse(text) == json.loads(text)


def test_values_that_python_takes_for_equal_have_texts_of_their_own() -> None:
    assert len({canonical(value) for value in ([1], [1.0], [True])}) == 3
    assert canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1}) == '{"a":2,"b":1}'
    assert checksum([1]) != checksum([1.0])
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical(float("nan"))


def test_a_truth_value_and_a_text_are_no_numbers() -> None:
    assert (real(3), real(0.5)) == (3, 0.5)
    for value in (True, "1", None, [1]):
        with pytest.raises(ValueError, match="expected a number"):
            real(value)


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_a_whole_number_is_nothing_else(value: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 0, got"):
        whole(value)
    assert whole(0) == 0
