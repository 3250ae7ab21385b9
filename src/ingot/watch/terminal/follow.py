"""Follow runs on a terminal: a full screen with keys, or plain screens where there is no terminal for it."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from ingot.errors import DataMissing
from ingot.watch.live import LiveRun
from ingot.watch.terminal.canvas import STYLES, Canvas, glyphs_for
from ingot.watch.terminal.views import WatchScreen

_TICK_SECONDS = 1.0  # between two looks at the run
_AGES_SECONDS = 5.0  # after which a screen is drawn again although nothing is new: times that passed are on it
_BUSY_SECONDS = 0.3  # of reading between two looks at the keys
_PLAIN_WIDTH, _PLAIN_HEIGHT = 80, 24  # of a screen that is printed into a file


def show(runs: Sequence[LiveRun], *, every: float | None, say: Callable[[str], None]) -> None:
    """Show runs until a person quits. Without a terminal, or with `every`, print a plain screen instead.

    every: seconds between two plain screens, until every run has ended; None: one screen. say: prints text. Raises
    DataMissing if a run folder vanishes.
    """
    if every is None and has_screen() and _full_screen(runs):
        return
    while True:
        _read(runs, seconds=None)
        if have_ended(runs):
            _read(runs, seconds=None)  # its last lines may be from between the two looks at its log and its lock
        say(plain(runs))
        if every is None or have_ended(runs):
            return
        try:
            time.sleep(every)
        except KeyboardInterrupt:  # it ends the full screen, too
            return


def has_screen() -> bool:
    """Return whether this process has a terminal that can be drawn on, and keys."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def have_ended(runs: Sequence[LiveRun]) -> bool:
    """Return whether every run was started and no process trains it now."""
    return all(run.state not in ("running", "not started") for run in runs)


def plain(runs: Sequence[LiveRun]) -> str:
    """Return a screen as text without colors."""
    import shutil

    size = shutil.get_terminal_size((_PLAIN_WIDTH, _PLAIN_HEIGHT))
    screen = WatchScreen(runs, glyphs_for(sys.stdout.encoding))
    canvas = screen.draw(max(size.columns, 40), _PLAIN_HEIGHT, keys=False)
    return "\n".join(canvas.lines()).rstrip()


def _read(runs: Sequence[LiveRun], seconds: float | None) -> bool:
    """Read what is new, for at most about `seconds`; None: all of it. Return whether more is there to read. Raises
    DataMissing if a run folder vanished."""
    ends = time.monotonic() + (seconds or 0.0)
    more = False
    for run in runs:
        if not run.folder.root.is_dir():
            raise DataMissing(
                "E-WATCH-GONE",
                f"{run.folder.root} is no longer there",
                rule="a run is watched while its folder exists",
                fix="if it was moved, name the new place: ingot watch RUN",
                run=str(run.folder.root),
            )
        if seconds is None:
            run.read_all()
            continue
        while (own := run.refresh() and run.unread > 0) and time.monotonic() < ends:
            pass
        more = more or own
    return more


def _full_screen(runs: Sequence[LiveRun]) -> bool:
    """Follow runs on the full screen until a person quits. Return False, with nothing drawn, if that is not possible
    here."""
    try:
        import curses
    except ImportError:  # a Python without it
        return False
    import locale

    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "")  # or curses writes no character beyond ASCII
    try:
        curses.setupterm()
    except curses.error:  # a terminal that terminfo does not know
        return False
    for name in ("LINES", "COLUMNS"):  # curses would take them for the size, also after the window has another one
        os.environ.pop(name, None)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _Follower(runs, curses).follow()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return True


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that the terminal gets back its own screen


class _Follower:
    """The loop over keys and looks at the runs. curses: the module, which not every Python has."""

    def __init__(self, runs: Sequence[LiveRun], curses):
        self.runs, self._curses = runs, curses
        self._keys = {
            curses.KEY_LEFT: "left", curses.KEY_RIGHT: "right", curses.KEY_UP: "up", curses.KEY_DOWN: "down",
            curses.KEY_PPAGE: "page up", curses.KEY_NPAGE: "page down", curses.KEY_HOME: "home", 9: "tab",
        }  # fmt: skip

    def follow(self) -> None:
        """Take the screen, follow the runs until a key ends it, and give the screen back as it was."""
        curses = self._curses
        window = curses.initscr()
        try:
            curses.noecho()
            curses.cbreak()
            window.keypad(True)
            with contextlib.suppress(curses.error):
                curses.curs_set(0)
            self._follow(window)
        finally:
            window.keypad(False)
            curses.nocbreak()
            curses.echo()
            curses.endwin()

    def _follow(self, window) -> None:
        curses, attributes = self._curses, self._attributes()
        screen = WatchScreen(self.runs, glyphs_for(window.encoding))
        due = drawn = 0.0
        seen: list[int] | None = None  # None: draw again, whatever the runs have
        while True:
            if time.monotonic() >= due:
                more = _read(self.runs, _BUSY_SECONDS)
                due = time.monotonic() + (0.0 if more else _TICK_SECONDS)
            versions = [run.version for run in self.runs]
            if versions != seen or time.monotonic() - drawn >= _AGES_SECONDS:
                height, width = window.getmaxyx()
                _paint(window, screen.draw(width, height), attributes, curses.error)
                seen, drawn = versions, time.monotonic()
            window.timeout(max(math.ceil(1000 * (due - time.monotonic())), 0))
            key = window.getch()
            if key >= 0:
                seen = None
            if key == curses.KEY_RESIZE:
                window.clear()
            elif key >= 0 and not screen.press(self._keys.get(key, chr(key) if key < 128 else "")):
                return

    def _attributes(self) -> dict[str, int]:
        """Return the attribute of each style: no colors if the terminal has none, or NO_COLOR is set."""
        curses = self._curses
        found: dict[str, int] = dict.fromkeys(STYLES, 0)
        found |= {"bold": curses.A_BOLD, "dim": curses.A_DIM, "reverse": curses.A_REVERSE}
        found |= {"red": curses.A_BOLD, "yellow": curses.A_BOLD}
        if os.environ.get("NO_COLOR") or not curses.has_colors():
            return found
        curses.start_color()
        curses.use_default_colors()
        for number, name in enumerate(("red", "green", "yellow", "blue", "magenta", "cyan"), 1):
            curses.init_pair(number, getattr(curses, f"COLOR_{name.upper()}"), -1)
            found[name] = curses.color_pair(number)
        return found


def _paint(window, canvas: Canvas, attributes: dict[str, int], error: type[Exception]) -> None:
    window.erase()
    for y in range(canvas.height):
        for x, text, style in canvas.runs(y):
            with contextlib.suppress(error):  # of the last cell, after which the cursor has no place
                window.addstr(y, x, text, attributes[style])
    window.refresh()
