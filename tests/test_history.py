from privfed.history import RoundSummary
from privfed.round import RoundRecord


def test_a_round_shows_itself_in_a_few_words_and_without_its_numbers() -> None:
    clients = [f"bank_{number}" for number in range(50)]
    record = RoundRecord(
        round=3,
        selected=tuple(clients),
        refused=(),
        silent={},
        history="ab" * 32,
        coefficients=dict.fromkeys(clients, 1),
        bytes_up=dict.fromkeys(clients, 30_000),
        bytes_down=dict.fromkeys(clients, 30_000),
        seconds={"train": 0.5},
    )
    summary = RoundSummary(record=record, epsilon=dict.fromkeys(clients, 1.5), grid_error_max=0, evaluation=None)
    assert repr(summary) == "RoundSummary(round=3, participants=50)"
