"""Faults in `ingot watch` in a terminal: what it draws, what it leaves on the screen, and when it ends."""

from .mutant import Mutant

_VIEWS = "tests/unit/watch/terminal/test_views.py"
_FOLLOW = "tests/unit/watch/terminal/test_follow.py"


def _mutant(name: str, what: str, file: str, before: str, after: str, test: str) -> Mutant:
    tests = (f"{_FOLLOW if file == 'follow.py' else _VIEWS}::{test}",)
    return Mutant(name=name, what=what, file=f"watch/terminal/{file}", before=before, after=after, tests=tests)


MUTANTS: list[Mutant] = [
    _mutant(
        "control-characters-drawn", "the name of a run moves the cursor", "canvas.py",
        'for char in printable(text).replace("\\n", " ")', 'for char in text.replace("\\n", " ")',
        "test_names_of_a_run_move_no_cursor",
    ),
    _mutant(
        "unicode-in-ascii", "an ASCII terminal gets characters that it lacks", "canvas.py",
        'char = "?"', "pass", "test_without_unicode_there_is_only_ascii",
    ),
    _mutant(
        "void-as-trained", "steps that were rolled back look like those that count", "plot.py",
        '(kind == "void" and (column + row) % 2)', "False", "test_void_steps_are_pale_and_incidents_are_below",
    ),
    _mutant(
        "gaps-bridged", "a line goes on over values that are not finite", "plot.py",
        "                before = None\n                continue", "                continue",
        "test_what_is_not_finite_is_a_gap_and_a_wide_range_is_logarithmic",
    ),
    _mutant(
        "incidents-undrawn", "no chart shows where something happened", "plot.py",
        "canvas.put(at, y + 1 + rows, canvas.glyphs.mark,", 'canvas.put(at, y + 1 + rows, " ",',
        "test_void_steps_are_pale_and_incidents_are_below",
    ),
    _mutant(
        "silence-unseen", "a run that was killed looks as if it went on", "views.py",
        'run.state in ("finished",', 'run.state in ("interrupted",',
        "test_a_run_without_a_sign_of_life_says_since_when",
    ),
    _mutant(
        "scroll-beyond-the-end", "the text scrolls away", "views.py",
        "self.scroll = min(self.scroll, max(len(lines) - room, 0))", "pass",
        "test_keys_change_the_view_the_text_and_the_zoom",
    ),
    _mutant(
        "heat-only-in-color", "without colors every rank looks the same", "text.py",
        "(text + mark.ljust(marks), style)", "(text, style)",
        "test_the_views_show_what_their_names_promise",
    ),
    _mutant(
        "screen-kept", "the terminal stays on the other screen", "follow.py",
        "            curses.endwin()\n", "            pass\n", "test_a_session_with_keys_new_steps_and_another_size",
    ),
    _mutant(
        "colors-against-the-wish", "NO_COLOR has no effect", "follow.py",
        'if os.environ.get("NO_COLOR") or not', "if not", "test_ctrl_c_leaves_a_terminal_without_colors_as_it_was",
    ),
    _mutant(
        "size-of-the-start", "another size of the window is not seen", "follow.py",
        "            height, width = window.getmaxyx()\n", "            height, width = 24, 80\n",
        "test_a_session_with_keys_new_steps_and_another_size",
    ),
    _mutant(
        "vanished-folder-watched", "a run folder that is gone is watched for ever", "follow.py",
        "if not run.folder.root.is_dir():", "if not run.folder:", "test_a_folder_that_vanishes_ends_it",
    ),
    _mutant(
        "escapes-for-files", "a file gets escape sequences", "follow.py",
        'and os.environ.get("TERM", "dumb") != "dumb"', "", "test_a_terminal_that_cannot_be_drawn_on_gets_text",
    ),
    _mutant(
        "plan-beyond-the-plot", "a run with a tenth of the planned speed seems to have all of it", "plot.py",
        "for band in chart.bands if math.isfinite(band.low + band.high)", "for band in chart.bands[:0]",
        "test_the_plan_is_drawn_where_it_is",
    ),
    _mutant(
        "short-runs-are-outliers", "a run that has just begun is a line at the edge of the plot", "plot.py",
        "len(found := values[np.isfinite(values)])]\n",
        "len(found := values[np.isfinite(values)])]\n    finite = [np.concatenate(finite)] if finite else []\n",
        "test_a_run_that_has_just_begun_and_few_points_are_no_outliers",
    ),
    _mutant(
        "outlier-in-its-mean", "one step flattens all others, because a mean is spread over its neighbors", "plot.py",
        'line.style == "raw" or (line.style == "main" and line.run not in raw)', 'line.style in ("raw", "main")',
        "test_a_run_that_has_just_begun_and_few_points_are_no_outliers",
    ),
    _mutant(
        "cropped-before-the-logarithm", "a logarithmic chart leaves out values that it could show", "plot.py",
        "if chart.log and min(values.min() for values in finite) > 0:", "if False:",
        "test_a_logarithm_or_a_zero_leaves_nothing_out_that_it_shows",
    ),
    _mutant(
        "zero-not-in-the-range", "values are left out although the axis begins at 0", "plot.py",
        ", from_zero=chart.from_zero) for", ") for",
        "test_a_logarithm_or_a_zero_leaves_nothing_out_that_it_shows",
    ),
]  # fmt: skip
