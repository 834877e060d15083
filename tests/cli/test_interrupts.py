"""Ctrl-C on a command line: one word and code 130, at whatever moment, also where it is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from jaxpage.interrupts import interruptible


@pytest.mark.parametrize(
    "lost",
    [
        "try:\n    signal.raise_signal(2)\nexcept KeyboardInterrupt: raise ImportError",
        "gc.callbacks.append(lambda *_: signal.raise_signal(2))\ngc.collect()",
        "time.sleep(0)\nsignal.raise_signal(2)",
    ],
    ids=["in an import", "in the collector", "plainly"],
)
def test_nothing_is_told_but_a_word_while_nothing_is_made(lost: str) -> None:
    start = (
        "import gc, signal, time\nfrom jaxpage.interrupts import leave_at_once\nleave_at_once()\n"
    )
    code = f"{start}{lost}\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("module", ["jaxpage.generate", "convert"])
def test_commands_listen_before_they_import_anything_slow(module: str) -> None:
    code = (
        "import runpy, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'argparse': signal.raise_signal(2)\n"
        "sys.modules.pop('argparse', None)\n"
        "sys.meta_path.insert(0, Stop())\n"
        f"sys.argv = ['x', '--help']\nrunpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_what_was_swallowed_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone() -> None:
    found = []

    def run() -> None:
        with interruptible() as check:
            check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_command_that_was_interrupted_waits_for_no_thread() -> None:
    code = (
        "import threading\nfrom jaxpage.interrupts import end\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('finished', end='')\nend(130)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "finished")
