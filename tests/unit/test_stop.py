"""Real signals to this process request a stop."""

from __future__ import annotations

import signal
import threading

import pytest

from crosstune.loop.stop import StopRequested, StopSignal


def send(number: signal.Signals) -> None:
    """Send a signal to this thread; Python runs its handler before the call returns."""
    signal.raise_signal(number)


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_is_a_wish_with_a_reason(number: signal.Signals, word: str) -> None:
    with StopSignal().listening() as stop:
        assert not stop.requested
        send(number)
        assert stop.requested and stop.reason == word


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="inside"), StopSignal().listening():
        assert signal.getsignal(signal.SIGINT) != before[0] and signal.getsignal(signal.SIGTERM) != before[1]
        raise ValueError("inside")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not() -> None:
    with StopSignal().listening() as stop:
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_first_reason_that_is_asked_for_stays() -> None:
    stop = StopSignal()
    stop.request("time is up")
    stop.request("no room")
    assert stop.requested and stop.reason == "time is up"


def test_droppable_work_is_left_at_once() -> None:
    with StopSignal().listening() as stop:
        done = []
        with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
            send(signal.SIGTERM)
            done.append("after the signal")
        assert done == []
        with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
            done.append("begun after a stop was requested")
        assert done == []


def test_work_after_a_droppable_part_is_not_dropped() -> None:
    with StopSignal().listening() as stop:
        with stop.interruptible():
            pass
        with pytest.raises(ValueError, match="inside"), stop.interruptible():
            raise ValueError("inside")
        send(signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_one_of_several_processes_drops_nothing() -> None:
    with StopSignal(shared=True).listening() as stop:
        done = []
        with stop.interruptible():
            send(signal.SIGTERM)
            done.append("after the signal")
        with stop.interruptible():
            done.append("after a request")
        assert done == ["after the signal", "after a request"] and stop.requested


def test_another_thread_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def listen() -> None:
        with StopSignal().listening() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
    assert signal.getsignal(signal.SIGTERM) == before
