"""Mixture policies: rules that turn the sizes of the sources into weights."""

from dataclasses import dataclass

from ingot.plugins.registry import Part, Reference, Registry


@dataclass(frozen=True, kw_only=True)
class MixturePolicy(Part):
    """A rule for weights, chosen by `ingot data mix --preset NAME`.

    weights(available, settings): returns (source -> weight, notes for the user). available: source -> its number of
      tokens. Weights are positive, in any unit; a source without a weight is not used. Caps on the repetition of a
      source are applied afterwards.
      settings: an instance of `settings`, from [mixture.NAME] of the recipe; None without settings.
    """

    weights: Reference


MIXTURES = Registry(
    "mixture",
    "--preset NAME",
    (
        MixturePolicy(name="classic", weights="ingot.data.mixture.shares:classic_weights"),
        MixturePolicy(name="natural", weights="ingot.data.mixture.shares:natural_weights"),
        MixturePolicy(name="equal", weights="ingot.data.mixture.shares:equal_weights"),
    ),
)
