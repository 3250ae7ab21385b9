"""Faults in what shows runs: the reader of a growing log, the thinning, the live page's server."""

from .mutant import Mutant

_SERIES = "tests/unit/watch/test_series.py"
_LIVE = "tests/unit/watch/test_live.py"
_CHARTS = "tests/unit/watch/test_charts.py"
_APP = "tests/unit/watch/test_app.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="thinned-peaks-lost",
        what="a peak between two pixels is not drawn",
        file="watch/series.py",
        before="for fill, reduce in ((np.inf, np.minimum), (-np.inf, np.maximum)):",
        after="for fill, reduce in ((np.inf, np.minimum),):",
        tests=(f"{_SERIES}::test_the_extremes_of_every_bucket_stay",),
    ),
    Mutant(
        name="not-finite-values-thinned-away",
        what="a NaN among many steps leaves no gap in a line",
        file="watch/series.py",
        before="    chosen.append(_first_per_bucket(np.flatnonzero(~finite), bucket))\n",
        after="",
        tests=(f"{_SERIES}::test_values_that_are_not_finite_stay_visible",),
    ),
    Mutant(
        name="void-steps-shown-as-valid",
        what="steps that were trained again stay in the line of the loss",
        file="watch/series.py",
        before="            self._kept -= 1",
        after="            break",
        tests=(f"{_SERIES}::test_a_step_back_makes_later_rows_void",),
    ),
    Mutant(
        name="restart-not-followed-by-pages",
        what="pages keep the steps from which a run went back",
        file="watch/live.py",
        before="        if any(went):\n            self.generation += 1",
        after="        pass",
        tests=(f"{_LIVE}::test_a_restart_makes_steps_void_and_a_page_asks_again",),
    ),
    Mutant(
        name="replaced-log-read-on",
        what="a log that was replaced by another is read on from the old position",
        file="watch/growing.py",
        before="if self._file not in (None, own) or found.st_size < self.position:",
        after="if found.st_size < self.position:",
        tests=(f"{_LIVE}::test_a_log_that_was_cut_or_replaced_is_read_anew",),
    ),
    Mutant(
        name="torn-line-lost",
        what="the rest of a line that was being written is read as a line of its own",
        file="watch/growing.py",
        before='        lines = added[: added.rfind(b"\\n") + 1]',
        after="        lines = added",
        tests=(f"{_LIVE}::test_a_torn_line_waits_for_its_rest",),
    ),
    Mutant(
        name="watch-unbounded",
        what="a reader keeps every event of a run of weeks",
        file="watch/live.py",
        before="        self._take_steps(pending)\n        self._prune()",
        after="        self._take_steps(pending)",
        tests=(f"{_LIVE}::test_many_incidents_and_alerts_stay_bounded",),
    ),
    Mutant(
        name="stacked-lines-at-other-steps",
        what="the parts of a step are added up at different steps",
        file="watch/charts.py",
        before="_stacked(lines, pixels) if kind.stacked else",
        after="[] if False else",
        tests=(f"{_CHARTS}::test_parts_of_a_step_are_at_the_same_steps",),
    ),
    Mutant(
        name="watch-token-not-asked",
        what="the live page shows runs to every user of the machine",
        file="web/guards.py",
        before="        return None if self._is_token(given) else _denied()",
        after="        return None",
        tests=(f"{_APP}::test_without_the_token_there_is_nothing",),
    ),
    Mutant(
        name="watch-any-host",
        what="a foreign site can rebind its name to the live page",
        file="web/guards.py",
        before="        if not self._is_known(_without_port(host)):",
        after="        if False:",
        tests=(f"{_APP}::test_other_sites_are_kept_out",),
    ),
    Mutant(
        name="watch-any-origin",
        what="a foreign site can ask the live page",
        file="web/guards.py",
        before="        if origin is not None and origin.lower() not in",
        after="        if False and origin.lower() not in",
        tests=(f"{_APP}::test_other_sites_are_kept_out",),
    ),
    Mutant(
        name="watch-slow-page-kept",
        what="messages for a page that does not read them pile up",
        file="watch/web/hub.py",
        before="                self._pages.discard(page)\n                page.close()",
        after="                continue",
        tests=(f"{_APP}::test_one_message_goes_to_every_page_and_slow_pages_are_let_go",),
    ),
    Mutant(
        name="watch-not-a-number-in-json",
        what="browsers cannot read an answer that has a NaN",
        file="watch/web/as_json.py",
        before="allow_nan=False, separators",
        after="separators",
        tests=(f"{_CHARTS}::test_numbers_that_are_not_finite_are_null_for_browsers",),
    ),
    Mutant(
        name="watch-answers-made-again",
        what="500 pages that open at once have the same answer made 500 times",
        file="watch/web/app.py",
        before="            while key in self._made:",
        after="            while False:",
        tests=(f"{_APP}::test_equal_requests_at_the_same_time_are_answered_once",),
    ),
]
