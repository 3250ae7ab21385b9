import json
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.extract import page_reference
from ingot.data.extract.page import COLUMNS, FINE, TOO_DEEP, TOO_MANY, parse_page
from ingot.data.extract.tags import NAMES
from ingot.data.extract.vocabulary import ElementMark
from ingot.data.native import compiled
from ingot.data.sources.warc import read_warc

needs_compiled = pytest.mark.skipif(compiled("_page") is None, reason="needs the compiled parser")


def outline(html: str) -> str:
    """The elements and texts of `html` as one nested line: "p(b('x'))"."""
    page = parse_page(html.encode())
    assert page.status == FINE

    def inside(row, stop):
        parts = []
        while row < stop:
            end = int(page.end[row])
            if page.tag[row]:
                content = inside(row + 1, end)
                parts.append((NAMES[page.tag[row]] or "?") + (f"({content})" if content else ""))
            else:
                parts.append(repr(page.html[page.start[row] : page.stop[row]].decode()))
            row = end
        return " ".join(parts)

    return inside(0, len(page.tag))


@pytest.fixture(params=["compiled", "reference"])
def either(request, monkeypatch):
    """Both parsers, one after the other."""
    if request.param == "reference":
        monkeypatch.setenv("INGOT_NATIVE", "0")
    elif compiled("_page") is None:
        pytest.skip("needs the compiled parser")


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>a<p>b<div>c</div>d", "p('a') p('b') div('c') 'd'"),
        ("<ul><li>1<li>2<ul><li>3</ul><li>4</ul>5", "ul(li('1') li('2' ul(li('3'))) li('4')) '5'"),
        ("<dl><dt>a<dd>b<dt>c</dl>", "dl(dt('a') dd('b') dt('c'))"),
        ("<table><tr><td>a<td>b<tr><th>c</table>d", "table(tr(td('a') td('b')) tr(th('c'))) 'd'"),
        ("<table><tr><td><table><tr><td>x</table>y</table>", "table(tr(td(table(tr(td('x'))) 'y')))"),
        ("<select><option>a<option>b</select>", "select(option('a') option('b'))"),
        ("<b>a</i>b</b>c", "b('a' 'b') 'c'"),  # an end tag without a start
        ("<p>a<b>b</p>c", "p('a' b('b')) 'c'"),
        ("<div><b>a</div>b", "div(b('a')) 'b'"),
        ("<b><div>a</b>b</div>", "b(div('a' 'b'))"),  # an inline end tag does not end a block
        ("<h1>a</h3>b", "h1('a') 'b'"),
        ("<h1>a<h2>b", "h1('a') h2('b')"),
        ("<a href=1>x<a href=2>y", "a('x') a('y')"),
        ("a<br>b</br>c<br/>d", "'a' br 'b' br 'c' br 'd'"),
        ("<x-y>a<X-Z>b</x-z>c</X-Y>d", "?('a' ?('b') 'c') 'd'"),
        ("<div/>a</div>b", "div('a') 'b'"),
        ("<svg><path/><g>x</g></svg>y", "svg(? ?('x')) 'y'"),
        ("<head><title>t<b></title><p>x", "head(title) p('x')"),
        ("<html><body><body class=x>a</body></html>b", "html(body('a' 'b'))"),
        ("<script>if (a<b) '</p>'</script >x", "script 'x'"),
        ("<noscript><p>a</noscript>b", "noscript 'b'"),
        ("<noscript><p>a", "noscript(p('a'))"),  # without an end tag it would swallow the page
        ("<textarea><p></textarea>x", "textarea 'x'"),
        ("a<!-- <p> -->b<!-->c<!--->d<!--x--!>e<!-- f", "'a' 'b' 'c' 'd' 'e'"),
        ("<!DOCTYPE html><?xml x?></ x>a", "'a'"),
        ("<svg><![CDATA[<p>]]>a</svg><![CDATA[<p>]]>b", "svg('a') ']]>b'"),
        ("1 < 2 <3 <", "'1 < 2 <3 <'"),
        ("a<p", "'a'"),
        ('a<p class="', "'a'"),
        ("<p>a</p> <p> </p>b", "p('a') p 'b'"),  # white space is no row
        ("<pre>a<b>\n</b> </pre>", "pre('a' b('\\n') ' ')"),  # but in <pre>
        ("<button>a<button>b", "button('a') button('b')"),
        ("<ruby>a<rt>b<rt>c</ruby>", "ruby('a' rt('b') rt('c'))"),
    ],
)
def test_the_tree(html, expected, either):
    assert outline(html) == expected


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ('class="post-body"', ElementMark.BODY),
        ("class=postBody", ElementMark.BODY),
        ("class='x post__body y'", ElementMark.BODY),
        ("id=POSTBODY", ElementMark.BODY),
        ("class=post-bodyguard", ElementMark(0)),  # whole words
        ("class=posts", ElementMark(0)),
        ('class="newsletters"', ElementMark.REQUEST),  # open at its end
        ("class=sidebar2", ElementMark.SIDE),
        ("role=search", ElementMark.NAVIGATION),
        ('class="role=navigation"', ElementMark.NAVIGATION),  # the class says "navigation"
        ("role=article-x", ElementMark.ARTICLE),
        ('itemprop="articleBody"', ElementMark.BODY),
        ('itemtype="https://schema.org/NewsArticle"', ElementMark.ARTICLE),
        ('style="color:red; DISPLAY : none"', ElementMark.HIDDEN),
        ('style="background: url(share)"', ElementMark(0)),  # only what names the attribute counts
        ('class="postbody"', ElementMark.BODY),
        ("hidden", ElementMark.HIDDEN),
        ("aria-hidden=true", ElementMark.HIDDEN),
        ("aria-hidden=false", ElementMark(0)),
        ('type="application/ld+json"', ElementMark.DATA),
        ("href", ElementMark.LINK),
        ("data-class=comment hrefs=x", ElementMark(0)),
        ("class=comment / class = share>", ElementMark.COMMENT | ElementMark.SHARE),
    ],
)
def test_what_attributes_say(attributes, expected, either):
    page = parse_page(f"<i {attributes}>x</i>".encode())
    assert ElementMark(int(page.flags[0])) == expected


@pytest.mark.parametrize(
    ("text", "chars", "marks"),
    [
        ("a b.\n", 3, 1),
        ("&amp;&#x41;&nope", 7, 0),
        ("äö\xa0ü", 3, 0),
        ("漢字、。", 8, 2),
        ("؟ ।", 2, 2),
        ("&#;;&;", 6, 3),
    ],
)
def test_counts_of_text(text, chars, marks, either):
    page = parse_page(text.encode())
    assert (page.chars.tolist(), page.marks.tolist()) == ([chars], [marks])


def test_rows_of_a_small_page(either):
    html = b"<div class=x>a <b>c</b></div>"
    page = parse_page(html)
    assert [NAMES[tag] for tag in page.tag] == ["div", "", "b", ""]
    assert page.parent.tolist() == [-1, 0, 0, 2] and page.end.tolist() == [4, 2, 4, 4]
    assert page.depth.tolist() == [0, 1, 1, 2]
    assert [html[a:b] for a, b in zip(page.start, page.stop, strict=True)] == [b" class=x", b"a ", b"", b"c"]


def test_limits(either):
    assert parse_page(b"<div>" * 5, max_depth=5).status == FINE
    page = parse_page(b"<div>" * 6, max_depth=5)
    assert page.status == TOO_DEEP and page.end.tolist() == [6] * 6
    page = parse_page(b"<p>a" * 3, max_nodes=5)
    assert page.status == TOO_MANY and len(page.tag) == 5


def same(html: bytes, max_depth: int = 1000, max_nodes: int = 1_000_000) -> None:
    page, (status, *columns) = parse_page(html, max_depth, max_nodes), page_reference.parse(html, max_depth, max_nodes)
    assert page.status == status
    for (name, kind), column in zip(COLUMNS.items(), columns, strict=True):
        assert np.array_equal(getattr(page, name), np.array(column, kind)), name
    rows = np.arange(len(page.tag))
    assert np.all(page.parent < rows) and np.all(page.end > rows) and np.all(page.start <= page.stop)
    inner = page.parent >= 0
    assert np.all(page.end[inner] <= page.end[page.parent[inner]])


_PIECES = (
    "<p> </p> <div > class= ' \" = / /> <a_href=x> </a> <!-- --> --!> - <script> </script </script> <li> </li> <ul> "
    "</ul> <table> <tr> <td> </td> </table> <b> </b> <x-y> </x-y> </X-Y_> &amp; &#x12; & x A. ü 。 ड़। \xa0 _ \n <svg> "
    "</svg> <![CDATA[ ]]> <!x <?y < </ </br> <br> <h1> </h2> <title> </title> <pre> </pre> <body> </body> <head> "
    "postBody post-body role=main style='display:_none' hidden \x00 <noscript> </noscript> <button> <option> <dd> <dt> "
    "😀"
).replace("\n", "\x0b")
_PIECE = st.sampled_from([piece.replace("_", " ").replace("\x0b", "\n") for piece in _PIECES.split(" ")])


@needs_compiled
@settings(max_examples=300)
@given(st.lists(_PIECE, max_size=40), st.sampled_from([3, 1000]), st.sampled_from([5, 1000]))
def test_both_parsers_agree_on_pieces_of_pages(pieces, max_depth, max_nodes):
    same("".join(pieces).encode(), max_depth, max_nodes)


@needs_compiled
@settings(max_examples=150)
@given(st.binary(max_size=80))
def test_both_parsers_agree_on_any_bytes(html):
    same(html)
    same(b"<p class=" + html)


@needs_compiled
def test_both_parsers_agree_on_broken_pages():
    pick, pieces = random.Random(1), [piece.replace("_", " ").replace("\x0b", "\n") for piece in _PIECES.split(" ")]
    for _ in range(2000):
        same("".join(pick.choices(pieces, k=pick.randint(1, 60))).encode())


@needs_compiled
def test_both_parsers_agree_on_real_pages(test_data):
    kinds = [json.loads(line) for line in (test_data / "truth_warc.jsonl").read_text().splitlines()]
    wanted = {row["record_id"] for row in kinds if row["kind"] == "real"}
    pages = (document.raw for document, _ in read_warc(test_data / "warc" / "shared-00001.warc.gz", "web")
             if document.record_id in wanted)  # fmt: skip
    for raw, _ in zip(pages, range(60), strict=False):
        same(raw)
        same(raw[: len(raw) // 2])


HOSTILE = {
    "nested": b"<div>" * 200_000,
    "siblings": b"<p>x</p>" * 300_000,
    "unclosed": b"<p>x" * 300_000,
    "inline": b"<b>" * 900 + b"</i><i>x</b>" * 200_000,
    "blocked end tags": b"<b><div>" + b"<i>" * 900 + b"</b>" * 500_000,
    "unknown names": b"<q1>" * 400 + b"<q2>" * 500 + b"</q3>" * 500_000,
    "many attributes": b"<p " + b"a=b " * 500_000 + b">x",
    "long attribute": b'<p class="' + b"share " * 500_000 + b'">x',
    "long word": b"<p class=" + b"x" * 3_000_000 + b">x",
    "open quote": b"<a b='" * 300_000,
    "open tags": b"<a " * 600_000,
    "open comments": b"<!-" * 600_000,
    "comments": b"<!---->" * 400_000,
    "half comments": b"<!--->" + b"<!-- --" * 400_000,
    "open scripts": b"<script>" * 300_000,
    "open noscripts": b"<noscript>" * 900 + b"<title>" * 200_000,
    "end tags": b"</p>" * 600_000,
    "lone brackets": b"<" * 3_000_000,
    "half cdata": b"<svg>" + b"<![CDATA[" * 300_000,
    "references": b"&lt" * 1_000_000,
    "lists": b"<ul><li>" * 400 + b"<li>x" * 200_000,
    "one line": b"word " * 2_000_000,
}


@needs_compiled
@pytest.mark.parametrize("name", HOSTILE)
def test_linear_time(name):
    start = time.process_time()
    page = parse_page(HOSTILE[name])
    assert page.status in (FINE, TOO_DEEP, TOO_MANY)
    assert time.process_time() - start < 1


def test_the_reference_takes_linear_time_too():
    start = time.process_time()
    for html in HOSTILE.values():
        page_reference.parse(html[:60_000], 1000, 100_000)
    assert time.process_time() - start < 8
