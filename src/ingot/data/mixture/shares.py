"""The number of tokens that a run takes from each source, from weights, a token budget, and a cap on repetition.

A source that is too small for its weight is repeated up to its cap; the missing tokens come from the other sources in
proportion to their weights. A budget that the caps do not allow is an error. Weights come from the command line
(source=share), a preset, or a file.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.data.guard import broken_contract
from ingot.data.parts import Table, created, in_words, module_of, settings_of
from ingot.errors import ConfigError, IngotError, UsageError
from ingot.plugins.mixture import MIXTURES
from ingot.plugins.registry import INGOT, resolve
from ingot.toml import parse_toml
from ingot.units import format_count

# Up to about four epochs, repeated tokens are nearly as useful as new tokens; after that their value falls quickly
# (Muennighoff et al. 2023, arXiv:2305.16264, figure 5 and section 6).
EPOCHS_WELL_SPENT = 4.0

# Shares that add up to one: an often quoted mixture for general models. Its parts add up to 95%; the rest is given to
# forums (questions and answers), which are also a source of LLaMA (Touvron et al. 2023, table 1).
CLASSIC = {"web": 0.70, "code": 0.10, "books": 0.05, "papers": 0.05, "encyclopedia": 0.05, "forums": 0.05}
NATURAL = "natural"  # the preset whose shares are those of the tokens
Weights = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """The share of one source.

    available: number of tokens the source has. tokens: number of tokens taken from it. wanted, share: its share of the
    budget, before and after caps. epochs: tokens / available.
    """

    source: str
    available: int
    wanted: float
    share: float
    tokens: int
    epochs: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of `tokens` tokens. sources: largest share first. notes: deviations from the weights. warnings:
    choices that may harm the run."""

    tokens: int
    sources: tuple[SourceShare, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def weights(self) -> dict[str, float]:
        """The shares for data.weights of a run, without sources from which no tokens are taken."""
        return {one.source: round(one.share, 6) for one in self.sources if one.tokens}


def preset_weights(
    name: str, available: Mapping[str, int], tables: Mapping[str, Table] | None = None
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return (weights of preset `name` for the available sources, notes for the user).

    name: a registered policy (plugins/mixture.py). available: the number of tokens of each source. tables: the settings
    of policies of plug-ins, by name. Raises UsageError for an unknown preset, or if none of its sources is available;
    ConfigError for a policy of a plug-in that raises, or that breaks its contract.
    """
    if name not in MIXTURES:
        raise UsageError(
            "E-MIXTURE-UNKNOWN",
            f"no mixture is called {name!r}",
            rule=f"the presets are {', '.join(MIXTURES.names())}",
            fix="name one of the presets, or a file with weights",
            name=name,
        )
    policy = MIXTURES[name].weights
    if module_of("mixture", name) == INGOT:
        return resolve(policy)(available, None)
    settings = settings_of("mixture", name, (tables or {}).get(name))
    return _checked(name, created("mixture", name, policy, dict(available), settings))


def _checked(name: str, found: Any) -> tuple[dict[str, float], tuple[str, ...]]:
    rule = "a policy returns (dict of source -> weight, list of notes); a weight is a number"
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)):
        raise broken_contract(in_words("mixture", name), f"returned {found!r}"[:200], rule)
    weights, notes = found
    numbers = all(isinstance(source, str) and type(w) in (int, float) for source, w in weights.items())
    if not (numbers and isinstance(notes, list | tuple) and all(isinstance(note, str) for note in notes)):
        raise broken_contract(in_words("mixture", name), f"returned {found!r}"[:200], rule)
    return {source: float(weight) for source, weight in weights.items()}, tuple(notes)


def natural_weights(available: Mapping[str, int], settings: None) -> tuple[Weights, tuple[str, ...]]:
    return {source: float(tokens) for source, tokens in available.items()}, ()


def equal_weights(available: Mapping[str, int], settings: None) -> tuple[Weights, tuple[str, ...]]:
    return dict.fromkeys(available, 1.0), ()


def classic_weights(available: Mapping[str, int], settings: None) -> tuple[Weights, tuple[str, ...]]:
    """Return the weights of `CLASSIC`, and notes on sources left out. The others get the share of a missing source."""
    weights = {source: share for source, share in CLASSIC.items() if source in available}
    if not weights:
        raise UsageError(
            "E-MIXTURE-NO-SOURCE",
            "the preset 'classic' has none of the sources of these tokens",
            rule=f"the preset mixes {', '.join(CLASSIC)}; these tokens have {', '.join(sorted(available))}",
            fix="name sources when building (data build --source NAME FILES), or give --weights",
            name="classic",
            sources=sorted(available),
        )
    missing, unnamed = [s for s in CLASSIC if s not in available], sorted(set(available) - set(CLASSIC))
    notes = []
    if missing:
        share = sum(CLASSIC[source] for source in missing)
        notes.append(f"{', '.join(missing)}: not in these tokens; the other sources get their share of {share:.0%}")
    if unnamed:
        notes.append(f"{', '.join(unnamed)}: not in the preset 'classic', so not used")
    return weights, tuple(notes)


def mix(
    available: Mapping[str, int],
    weights: Mapping[str, float],
    tokens: int,
    max_epochs: float | Mapping[str, float] = EPOCHS_WELL_SPENT,
) -> Mixture:
    """Divide `tokens` among the sources. weights: positive shares in any unit; a source without a weight is not used.

    max_epochs: one cap for all sources, or a cap for some of them (EPOCHS_WELL_SPENT for the others). Raises
    ConfigError for unknown or empty sources, for invalid numbers, and if the caps do not allow the budget.
    """
    _check(available, weights, tokens)
    caps = _caps(available, weights, max_epochs)
    total = sum(weights.values())
    wanted = {source: weight / total for source, weight in weights.items()}
    amounts = _fill(wanted, caps, float(tokens))
    whole = _whole(amounts, tokens)
    shares = [
        SourceShare(
            source=source,
            available=available[source],
            wanted=wanted[source],
            share=amounts[source] / tokens,
            tokens=whole[source],
            epochs=whole[source] / available[source],
        )
        for source in weights
    ]
    notes = [
        f"{one.source}: {one.wanted:.1%} wanted, {one.share:.1%} given; its {format_count(one.available)} tokens are "
        f"repeated {one.epochs:.3g} times, the cap"
        for one in shares
        if one.share < one.wanted * (1 - 1e-9)
    ]
    warnings = [
        f"{one.source} is repeated {one.epochs:.1f} times; beyond {EPOCHS_WELL_SPENT:g} epochs repeated tokens are "
        "worth much less than new ones (Muennighoff et al. 2023)"
        for one in shares
        if one.epochs > EPOCHS_WELL_SPENT * (1 + 1e-9)
    ]
    return Mixture(
        tokens=tokens,
        sources=tuple(sorted(shares, key=lambda one: (-one.share, one.source))),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _check(available: Mapping[str, int], weights: Mapping[str, float], tokens: int) -> None:
    if not weights:
        raise ConfigError(
            "E-MIXTURE-EMPTY",
            "the mixture has no sources",
            rule=f"a mixture has at least one of these sources: {', '.join(sorted(available))}",
            fix="give a weight to at least one source",
        )
    for source, weight in weights.items():
        _require_known(source, available)
        if not 0 < weight < float("inf"):
            raise ConfigError(
                "E-WEIGHT-RANGE",
                f"the weight of {source} is {weight}",
                rule="weights are positive finite numbers",
                fix="give a positive weight, or remove the source from the weights",
                source=source,
                weight=weight,
            )
        if available[source] < 1:
            raise ConfigError(
                "E-SOURCE-EMPTY",
                f"the source {source!r} has no tokens",
                rule="every source of a mixture has tokens",
                fix="remove the source from the weights",
                source=source,
            )
    if tokens < 1:
        raise ConfigError(
            "E-MIXTURE-BUDGET",
            f"the budget is {tokens} tokens",
            rule="the budget is at least one token",
            fix="give a positive number of tokens",
            tokens=tokens,
        )


def _require_known(source: str, available: Mapping[str, int]) -> None:
    if source not in available:
        close = difflib.get_close_matches(source, list(available), n=1)
        raise ConfigError(
            "E-SOURCE-UNKNOWN",
            f"the tokens have no source {source!r}",
            rule=f"the sources of these tokens are {', '.join(sorted(available))}",
            fix=f"did you mean {close[0]!r}?" if close else "remove the source from the weights",
            source=source,
            close=close,
        )


def _caps(
    available: Mapping[str, int], weights: Mapping[str, float], max_epochs: float | Mapping[str, float]
) -> dict[str, float]:
    """Return the largest number of tokens that may be taken from each source."""
    own = max_epochs if isinstance(max_epochs, Mapping) else dict.fromkeys(weights, max_epochs)
    for source, epochs in own.items():
        _require_known(source, available)
        if not epochs > 0:
            raise ConfigError(
                "E-MIXTURE-EPOCHS",
                f"max_epochs of {source} is {epochs}",
                rule="max_epochs is above 0",
                fix="give a positive number, or remove the source from the weights",
                source=source,
                max_epochs=epochs,
            )
    return {source: own.get(source, EPOCHS_WELL_SPENT) * available[source] for source in weights}


def _fill(wanted: Mapping[str, float], caps: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Return the tokens of each source: its cap, or, for sources below their caps, a part in proportion to `wanted`.

    Raises ConfigError if the caps add up to less than `tokens`.
    """
    amounts: dict[str, float] = {}
    open_ones, left = dict(wanted), tokens
    while open_ones:
        total = sum(open_ones.values())
        over = [source for source, share in open_ones.items() if left * share / total > caps[source]]
        if not over:
            return amounts | {source: left * share / total for source, share in open_ones.items()}
        for source in over:
            amounts[source] = caps[source]
            del open_ones[source]
        left = tokens - sum(amounts.values())
    if left <= 1e-9 * tokens:
        return amounts
    possible = sum(caps.values())
    raise ConfigError(
        "E-MIXTURE-CAPS",
        f"{format_count(tokens)} tokens are wanted, but these sources have {format_count(possible)} at their caps",
        rule="no source is repeated more often than its cap (max_epochs)",
        fix="lower the budget, raise max_epochs, or add sources",
        tokens=tokens,
        possible=possible,
    )


def _whole(amounts: Mapping[str, float], tokens: int) -> dict[str, int]:
    """Return `amounts` rounded to whole numbers that add up to `tokens`, by the method of largest remainders."""
    whole = {source: int(amount) for source, amount in amounts.items()}
    by_remainder = sorted(amounts, key=lambda source: whole[source] - amounts[source])
    for source in by_remainder[: tokens - sum(whole.values())]:
        whole[source] += 1
    return whole


def parse_weights(pairs: Sequence[str]) -> Weights:
    """Return the weights in `pairs`, such as ["web=.7", "code=0.3"]. Raises UsageError for another form."""
    found: Weights = {}
    for pair in pairs:
        source, sign, value = pair.rpartition("=")
        try:
            found[source] = float(value)
        except ValueError:
            sign = ""
        if not sign or not source:
            raise UsageError(
                "E-WEIGHT-FORM",
                f"{pair!r} is not a weight",
                rule="a weight is SOURCE=SHARE",
                fix="write a weight like web=0.7",
                text=pair,
            )
    return found


def read_weights(path: Path) -> Weights:
    """Return the weights in a run file ([data.weights]), in TOML lines source = share, or in the JSON that DSIR or
    DoReMi wrote.

    Raises ConfigError if the file cannot be read or has no weights.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else parse_toml(text, str(path))
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise _unreadable(path, error) from None
    for names in (("data", "weights"), ("weights",)):
        inner = values
        for name in names:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            values = inner
            break
    numbers = isinstance(values, Mapping) and all(type(value) in (int, float) for value in values.values())
    if not numbers or not values:
        raise ConfigError(
            "E-WEIGHTS-MISSING",
            f"{path} has no weights",
            rule="weights are in [data.weights] of a run file, in [weights], or in a file with only source = share",
            fix="write lines like web = 0.7",
            path=str(path),
        )
    try:
        return {str(source): float(value) for source, value in values.items()}
    except OverflowError as error:  # JSON has whole numbers of thousands of digits
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "E-WEIGHTS-UNREADABLE",
        f"no weights can be read from {path} ({error.found if isinstance(error, IngotError) else error})",
        rule="a file of weights is TOML or JSON, and a weight fits into a float",
        fix="correct the file: write lines like web = 0.7",
        path=str(path),
    )


def named_weights(
    spec: str, available: Mapping[str, int], tables: Mapping[str, Table] | None = None
) -> tuple[str, Weights, tuple[str, ...]]:
    """Return (name, weights, notes) of the mixture `spec`: the name of a preset, or the path of a file, whose stem is
    then the name. tables: see `preset_weights`."""
    if spec in MIXTURES:
        return spec, *preset_weights(spec, available, tables)
    path = Path(spec)
    if not path.exists():
        raise UsageError(
            "E-MIXTURE-UNKNOWN",
            f"no mixture is called {spec!r}",
            rule=f"a mixture is a file with weights, or one of {', '.join(MIXTURES.names())}",
            fix="correct the path, or name one of the presets",
            name=spec,
        )
    return path.stem, read_weights(path), ()
