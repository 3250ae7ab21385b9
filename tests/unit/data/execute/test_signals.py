import signal
import subprocess
import sys

from ingot.data.execute.signals import deaf_to_ctrl_c


def blocked() -> set:
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_children_do_not_hear_ctrl_c_and_the_parent_does_again():
    child = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('deaf')"
    with deaf_to_ctrl_c():
        assert signal.SIGINT in blocked()
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert done.stdout == "deaf\n"
    assert signal.SIGINT not in blocked()
