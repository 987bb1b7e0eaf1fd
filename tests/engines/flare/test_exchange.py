import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

from privfed.engines.flare import exchange as module
from privfed.engines.flare.exchange import FlareExchange
from privfed.errors import EngineError

BANKS = ("bank_a", "bank_b")


class Engine:
    """FLARE's side of a broadcast: each bank answers as it is told, in a thread of its own."""

    def __init__(self, answers: Mapping[str, Callable[[bytes], Any]]) -> None:
        self.answers = answers
        self.tasks: list[Task] = []
        self.cancelled: list[str] = []

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.answers]

    def get_engine(self) -> "Engine":
        return self

    def broadcast(self, task: Task, _context: object, *, targets: list[str], min_responses: int) -> None:
        assert min_responses == len(targets) == 1
        self.tasks.append(task)
        threading.Thread(target=self._answer, args=(task, targets[0]), daemon=True).start()

    def _answer(self, task: Task, name: str) -> None:
        result = self.answers[name](task.data["request"])
        if task.completion_status is None and task.result_received_cb is not None:
            task.result_received_cb(client_task=SimpleNamespace(result=result), fl_ctx=None)
            task.completion_status = TaskCompletionStatus.OK

    def cancel_task(self, task: Task, *, fl_ctx: object) -> None:
        task.completion_status = TaskCompletionStatus.CANCELLED
        self.cancelled.append(task.name)


def reply(data: object, code: str = ReturnCode.OK) -> Any:
    answer = make_reply(code)
    answer["reply"] = data
    return answer


def never(_request: bytes) -> None:
    time.sleep(60)


def exchange(engine: Engine, abort: Signal | None = None) -> FlareExchange:
    return FlareExchange(engine, context=engine, abort=abort or Signal())  # pyright: ignore[reportArgumentType]


def test_every_party_gets_its_own_request_and_its_reply_comes_back_under_its_name() -> None:
    engine = Engine({name: (lambda request: reply(request + b"!")) for name in BANKS})
    assert exchange(engine).ask({"bank_a": b"one", "bank_b": b"two"}, seconds=10) == {"bank_a": b"one!", "bank_b": b"two!"}
    assert engine.cancelled == []


def test_who_does_not_answer_in_time_is_left_out_and_its_task_is_cancelled() -> None:
    engine = Engine({"bank_a": reply, "bank_b": never})
    begun = time.monotonic()
    assert exchange(engine).ask(dict.fromkeys(BANKS, b"?"), seconds=0.5) == {"bank_a": b"?"}
    assert 0.5 <= time.monotonic() - begun < 5
    assert engine.cancelled == ["privfed"]


def test_who_is_not_in_the_job_is_not_asked() -> None:
    engine = Engine({"bank_a": reply})
    assert exchange(engine).ask(dict.fromkeys(BANKS, b"?"), seconds=10) == {"bank_a": b"?"}
    assert len(engine.tasks) == 1


@pytest.mark.parametrize(
    "answer",
    [reply("text"), reply(["b"]), reply(None), reply(b"!", ReturnCode.EXECUTION_EXCEPTION), make_reply(ReturnCode.OK), None],
    ids=["text", "list", "none", "failed", "empty", "no result"],
)
def test_what_is_no_reply_counts_as_none(answer: Any) -> None:
    engine = Engine({"bank_a": lambda _request: answer, "bank_b": reply})
    assert exchange(engine).ask(dict.fromkeys(BANKS, b"?"), seconds=10) == {"bank_b": b"?"}


def test_an_aborted_job_ends_the_run_and_cancels_what_is_under_way() -> None:
    abort = Signal()
    engine = Engine(dict.fromkeys(BANKS, never))
    threading.Timer(0.3, lambda: abort.trigger(True)).start()
    with pytest.raises(EngineError, match="aborted; what is stored stays"):
        exchange(engine, abort).ask(dict.fromkeys(BANKS, b"?"), seconds=60)
    assert len(engine.cancelled) == 2


def test_a_request_that_flare_does_not_carry_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    engine = Engine(dict.fromkeys(BANKS, reply))
    with pytest.raises(EngineError, match="longer than 10 bytes"):
        exchange(engine).ask({"bank_a": b"short", "bank_b": bytes(11)}, seconds=1)
    assert engine.tasks == []


def test_what_comes_after_the_time_is_up_is_not_added_to_what_was_returned() -> None:
    late = threading.Event()
    engine = Engine({"bank_a": lambda request: late.wait(10) and reply(request)})
    replies = exchange(engine).ask({"bank_a": b"?"}, seconds=0.2)
    engine.tasks[0].result_received_cb(client_task=SimpleNamespace(result=reply(b"late")), fl_ctx=None)
    late.set()
    assert replies == {}
