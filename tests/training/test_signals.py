"""The first signal is noted, the second ends the process at once; handlers are put back."""

import os
import signal
import threading

import pytest

from unmask.training.signals import Interrupt


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_noted_and_second_raises(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        os.kill(os.getpid(), number)
        assert interrupt.signal == number
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
            os.kill(os.getpid(), number)
        if number == signal.SIGTERM:
            assert caught.value.code == 143
    assert signal.getsignal(number) is before


def test_other_threads_run_without_handlers():
    seen = []

    def work():
        with Interrupt() as interrupt:
            seen.append(interrupt.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
