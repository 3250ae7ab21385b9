"""A thread that does something again and again while this process may wait for something else. No torch."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeated(act: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Call `act` every `seconds` during the block, in a thread called `name`. The block ends when the last call has."""
    ends = threading.Event()

    def work() -> None:
        while not ends.wait(seconds):
            act()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
