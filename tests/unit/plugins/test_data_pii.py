"""Kinds of personal data of plug-ins: what they replace, and what happens when their spans are wrong."""

import pytest
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import document, plugins  # noqa: F401

from ingot.data.build.own_filters import make_pii
from ingot.data.guard import FIRST_DOCUMENTS
from ingot.data.pii import KINDS, find_card, find_email, find_ip, find_phone, scrub
from ingot.plugins.pii import PII_KINDS
from ingot.plugins.registry import resolve

BADGE = """
import re
@dataclass(frozen=True, kw_only=True)
class Rules:
    digits: int = 5
def find(text, rules):
    {}
    return (match.span() for match in re.finditer(rf"\\bB[0-9]{{{{{{rules.digits}}}}}}\\b", text))
PII_KINDS.register(PiiKind(name="badge", find=find, settings=Rules, placeholder="<BADGE>"))
"""
LONG = " The people of the house read the story of the river again and again." * 5


def stage_of(plugins, body="pass", text=""):  # noqa: F811
    plugins.write("badges", BADGE.format(body))
    return make_pii(plugins.recipe(f"[pii]\nkinds = ['email', 'badge']\n{text}", "badges"))


def test_a_kind_of_a_plugin_replaces_its_spans(plugins):  # noqa: F811
    stage = stage_of(plugins)
    page = document("Badge B12345, badge B123, mail B12345@corp-site.org." + LONG)
    assert stage(page) is None
    assert page.text.startswith("Badge <BADGE>, badge B123, mail <BADGE>@corp-site.org.")  # kept before e-mail
    assert page.notes == {"pii_badge": 2}
    assert stage.ran.startswith("e-mail, badge, no ids")
    assert stage_of(plugins, text="[pii_kind.badge]\ndigits = 3")(page) is None
    assert page.text.startswith("Badge <BADGE>, badge <BADGE>,")


@pytest.mark.parametrize(
    "spans",
    ["[(0, 0)]", "[(-1, 3)]", "[(0, 10**6)]", "[(5, 2)]", "[(0, 4), (3, 6)]", "[(0, 4), (0, 4)]", "[3]", "[(0, 4, 5)]",
     "[(0.0, 4)]", "3", "None", "[[0, 4]]"],
)  # fmt: skip
def test_wrong_spans_drop_the_document(plugins, spans):  # noqa: F811
    drop = stage_of(plugins, f"return {spans}")(document("Badge B12345." + LONG))
    assert drop.rule == "pii.plugin"  # it may still hold personal data
    assert drop.value


def test_spans_may_touch_and_have_any_order(plugins):  # noqa: F811
    page = document("B1B2 is read." + LONG)
    assert stage_of(plugins, "return [(2, 4), (0, 2)]")(page) is None
    assert page.text.startswith("<BADGE><BADGE> is read.")


def test_a_kind_that_raises_on_each_of_the_first_documents_ends_the_build(plugins):  # noqa: F811
    stage = stage_of(plugins, "1 / 0")
    assert "badges.py:" in stage(document("x")).value
    for _ in range(FIRST_DOCUMENTS - 2):
        stage(document("x"))
    with refused("E-DATA-PLUGIN-RAISED", part="kind of personal data 'badge' of plug-in badges"):
        stage(document("x"))


def test_a_kind_that_is_not_registered_is_refused_with_its_line(plugins):  # noqa: F811
    with refused("E-CONFIG-SETTINGS") as caught:
        plugins.recipe("[pii]\nkinds = ['emial']")
    assert named(caught.value.facts["problems"], "recipe.toml:4", "email")


def test_the_placeholder_is_a_text(plugins):  # noqa: F811
    plugins.write("odd_kind", 'PII_KINDS.register(PiiKind(name="odd", find=lambda text, settings: [], placeholder=3))')
    with refused("E-DATA-PLUGIN-RESULT"):
        make_pii(plugins.recipe("[pii]\nkinds = ['odd']", "odd_kind"))


@pytest.mark.parametrize(
    ("kind", "find", "text"),
    [
        ("email", find_email, "Write to jane@corp-site.org today"),
        ("ip", find_ip, "from 8.8.4.4 and 2001:4860:4860::8888 here"),
        ("card", find_card, "card 4111 1111 1111 1111 here"),
        ("phone", find_phone, "Tel. +44 20 7946 0958 here"),
    ],
)
def test_own_kinds_fulfil_the_contract(kind, find, text):
    assert kind in KINDS and resolve(PII_KINDS[kind].find) is find
    expected = text
    for start, end in sorted(find(text, None), reverse=True):
        expected = expected[:start] + PII_KINDS[kind].placeholder + expected[end:]
    assert expected != text and scrub(text, [kind])[0] == expected
