"""The thread that works off the rounds: in order, two under way, and never leaving anybody waiting."""

import queue
import threading

import pytest

from unmask.blocks.exchange.wire import AHEAD, _pump


class Recorded:
    """A round that notes what is done with it; `fails` names the call that raises."""

    def __init__(self, number, events, fails=None):
        self.number, self.events, self.fails, self.error = number, events, fails, None
        self.over = threading.Event()

    def _do(self, what):
        self.events.append((what, self.number))
        if self.fails == what:
            raise ValueError(what)

    def start(self):
        self._do("start")

    def finish(self):
        self._do("finish")

    def let_go(self, error):
        self.error = error
        self.over.set()


def pumped(*fails):
    events, rounds = [], queue.SimpleQueue()
    made = [Recorded(number, events, what) for number, what in enumerate(fails)]
    for each in [*made, None]:
        rounds.put(each)
    thread = threading.Thread(target=_pump, args=(rounds,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and all(each.over.is_set() for each in made)
    return made, events


def test_rounds_start_in_order_and_one_ahead_of_the_one_that_is_finished():
    made, events = pumped(None, None, None, None)
    assert [number for what, number in events if what == "start"] == [0, 1, 2, 3]
    assert all(events.index(("start", n + AHEAD - 1)) < events.index(("finish", n)) for n in range(3))
    assert all(events.index(("finish", n)) < events.index(("start", n + AHEAD)) for n in range(2))
    assert [each.error for each in made] == [None] * 4


@pytest.mark.parametrize("what", ["start", "finish"])
def test_whatever_fails_is_handed_to_everybody_who_waits_from_then_on(what):
    made, events = pumped(None, what, None)
    assert made[0].error is None or what == "start"
    assert all(isinstance(each.error, ValueError) for each in made[1:])
    assert ("start", 2) not in events or what == "finish"
