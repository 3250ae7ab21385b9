import time

import pytest

from ingot.data.extract.html import ExtractRules, extract_text

SENTENCE = "The river rose again last night, and the people of the town carried their books to the upper floor. "
TEXT = "".join(f"<p>{n}. {SENTENCE * 3}</p>" for n in range(5))
LINKS = "".join(f'<li><a href="/{n}">Another story of ours, number {n}</a></li>' for n in range(12))


def lines(html: str) -> list[str]:
    return [line for line in extract_text(html, ExtractRules(method="accurate")).split("\n") if line]


def words_of(html: str) -> str:
    return " ".join(lines(html))


PROSE = lines(f"<div>{TEXT}</div>")


def test_prose_alone_stays_whole():
    assert len(PROSE) == 5 and PROSE[0] == f"0. {SENTENCE * 3}".strip()


@pytest.mark.parametrize(
    "page",
    [
        "<body><nav>{links}</nav><main>{text}</main><footer>All rights reserved.</footer>",
        "<body><ul>{links}</ul><div>{text}</div><div>{links}</div>",  # no names at all
        "<body><div class=sidebar><p>{sentence}</p></div><div class=entry-content>{text}</div>",
        "<body><article>{text}<div class='related-posts'><p>{sentence}</p></div></article>",
        "<body><article>{text}<section id=comments><p>{sentence}{sentence}</p></section></article>",
        "<body><article>{text}<h2>More stories</h2><ul>{links}</ul></article>",
        "<body><article><div class=share>Share on Weibo</div>{text}</article>",
        "<body><article><span>Advertisement</span>{text}<div>12 views</div></article>",
        "<body><div hidden><p>{sentence}</p></div><div>{text}</div>",
        "<body><div style='display:none'><p>{sentence}</p></div><div>{text}</div>",
        "<body><div class='cookie-consent'><p>{sentence}</p></div><article>{text}</article>",
        "<body class='has-sidebar comments-open share'><div>{text}</div></body>",  # speaks of the page
        "<body><div class=newsletter-layout>{text}</div>",  # the name would be wrong: it holds everything
        "{text}",  # no element around it
        "<head><title>A title</title></head>{text}",
        "<body><article>{text}<figure><img><figcaption>A river. Photo: Ann Other</figcaption></figure></article>",
        "<table><tr><td>{links}</td><td>{text}</td></tr></table>",
        "<body><form><button>Go</button><select><option>one</select>{text}<textarea>{sentence}</textarea></form>",
    ],
)
def test_only_the_prose_is_left(page):
    assert lines(page.format(text=TEXT, links=LINKS, sentence=SENTENCE)) == PROSE


def teasers(count, href="/{n}", summary=SENTENCE):
    link = "<a href='" + href + "'>A story of ours, number {n}</a>"
    return "".join(f"<div><h3>{link.format(n=n)}</h3><p>{summary} {n}</p></div>" for n in range(count))


def test_teasers_of_other_pages_go():
    assert lines(f"<body><div>{TEXT}<section>{teasers(6)}</section></div>") == PROSE
    excerpts = "".join(
        f"<li><a href='/{n}'>A story of ours, number {n}</a> <span>{SENTENCE.strip()[:-1]}...</span>" for n in range(3)
    )
    assert lines(f"<body><div>{TEXT}<ul>{excerpts}</ul></div>") == PROSE


def test_what_only_looks_like_teasers_stays():
    two = words_of(f"<body><div>{TEXT}<section>{teasers(2)}</section></div>")
    assert two.count(SENTENCE.strip()) == 15 + 2
    answers = words_of(f"<body><div>{TEXT}<section>{teasers(6, '#{n}')}</section></div>")  # questions that open
    assert answers.count(SENTENCE.strip()) == 15 + 6
    chapters = words_of(f"<body><div>{TEXT * 4}<section>{teasers(6, summary=SENTENCE * 8)}</section></div>")
    assert chapters.count(SENTENCE.strip()) == 4 * 15 + 6 * 8
    overview = words_of(f"<body><div><p>{SENTENCE}</p>{teasers(30)}</div>")  # what the page is about
    assert overview.count(SENTENCE.strip()) == 31


def test_boxes_in_one_enormous_link_take_linear_time():
    box = f"<div><b>A story of ours, number one</b><p>{SENTENCE}</p></div>"
    page = f"<body><div>{TEXT}</div><a href=/x title='{'y' * 1_000_000}'>" + box * 2000
    started = time.process_time()
    words_of(page)
    assert time.process_time() - started < 2  # a scan of the tag per box would be 2 GB


def test_a_standfirst_outside_of_the_text_is_taken_in():
    lead = SENTENCE * 2
    html = f"<body><header><h1>A river</h1><p>{lead}</p><p>By Ann</p></header><div class=article-body>{TEXT}</div>"
    assert lines(html) == [lead.strip(), *PROSE]


def test_several_parts_of_one_article():
    parts = "".join(f"<div class=article-text><h2>Part {n}</h2><p>{n}. {SENTENCE * 3}</p></div>" for n in range(4))
    text = lines(f"<body><div class=page><div>{parts}</div><ul>{LINKS}</ul></div>")
    assert [line for line in text if line.startswith("Part")] == [f"Part {n}" for n in range(4)] and len(text) == 8


def test_lists_tables_quotes_and_code_stay_in_order():
    html = f"""<article><h1>Title</h1><p>{SENTENCE}</p><ul><li>one thing</li><li>another <b>thing</b></li></ul>
    <blockquote>{SENTENCE}</blockquote><table><tr><th>Name<th>Height<tr><td>Oak<td>20 m</table>
    <pre>def f(x):\n    return  x\n</pre><h2>End</h2><p>{SENTENCE}</p></article>"""
    s = SENTENCE.strip()
    assert extract_text(html, ExtractRules(method="accurate")) == (
        f"Title\n\n{s}\n\none thing\nanother thing\n\n{s}\n\nName\tHeight\nOak\t20 m\n\n"
        f"def f(x):\n    return  x\n\nEnd\n\n{s}"
    )


def test_lines_and_spaces():
    start = "a<b>b</b> c <i>d</i>\n\n e<!-- -->f<br>g&nbsp;h &lt;i&gt; <a href=x>j</a>, k:"
    assert lines(f"<div><p>{start} {SENTENCE}</p>{TEXT}</div>")[:2] == [
        "ab c d ef",
        f"g h <i> j, k: {SENTENCE}".strip(),
    ]


def test_a_word_that_was_cut_out_leaves_a_space():
    assert lines(f"<p>{SENTENCE}one<button>x</button>two</p>") == [f"{SENTENCE}one two"]


def test_numbers_of_characters_without_end():
    assert "\ufffd" in words_of(f"<p>&#{'9' * 5000}; &#x{'f' * 5000}; {SENTENCE}</p>")


def test_ideographs_count_for_more():
    text = "河水昨夜又涨了，镇上的人把书搬到楼上。"
    assert words_of(f"<body><ul>{LINKS}</ul><div><p>{text}</p><p>{text}</p></div>") == f"{text} {text}"


def test_hidden_text_that_scripts_would_show():
    assert lines(f"<body><div style='display:none'>{TEXT}</div><p>Please wait.</p>") == PROSE


def test_short_pages_fall_back_to_what_there_is():
    assert words_of("<body><div class=teaser><p>A few words, no more.</p></div>") == "A few words, no more."
    assert words_of("<p>Poems<br>are<br>short") == "Poems are short"
    assert words_of("") == words_of("<nav>Home</nav>") == ""


@pytest.mark.parametrize(
    ("json", "found"),
    [
        ('{"@type": "Article", "articleBody" : "%s"}', True),
        ('[{"articleBody": "no"}, {"articleBody": "%s"}]', True),
        ('{"articleBody": "%s', False),
        ('{"articleBody": ["%s"]}', False),
    ],
)
def test_structured_data_where_the_page_has_no_text(json, found):
    body = f"{SENTENCE * 4}\\n\\u00e9t\\u00e9 &amp; so on"
    html = f'<script type="application/ld+json">{json % body}</script><body><div id=app><p>Loading.</p></div>'
    assert words_of(html) == (f"{SENTENCE * 4}été & so on" if found else "Loading.")
    assert words_of(html.replace("<body>", f"<body>{TEXT}")) == " ".join([*PROSE, "Loading."])  # not where it has


def test_without_the_compiled_parser_the_text_is_the_same(monkeypatch):
    html = f"<body><nav>{LINKS}</nav><article>{TEXT}</article>"
    expected = lines(html)
    monkeypatch.setenv("INGOT_NATIVE", "0")
    assert lines(html) == expected == PROSE


def test_a_table_of_data_is_one_line_per_row_and_stays_whole():
    rows = "".join(
        f"<tr><td><a href=/{n}>draft-{n}-of-a-long-name</a><td>{n} May<td>On hold for now, until the next meeting"
        for n in range(4)
    )
    text = lines(f"<article>{TEXT}<table><tr><th>Name<th>Date<th>Status{rows}</table></article>")
    assert text[5:7] == ["Name\tDate\tStatus", "draft-0-of-a-long-name\t0 May\tOn hold for now, until the next meeting"]
    assert len(text) == 10


def test_a_sentence_of_many_links_stays_and_a_list_of_them_goes():
    sentence = (
        "<a href=1>Oaks</a>, <a href=2>birches</a> and <a href=3>alders</a> grow by the river, like <a href=4>reed</a>."
    )
    text = lines(f"<article><p>{sentence}</p>{TEXT}<p><a href=1>Oaks</a> | <a href=2>Birches</a></p></article>")
    assert text == ["Oaks, birches and alders grow by the river, like reed.", *PROSE]


def test_headings_of_nothing_go():
    html = f"<article><h1>Rivers</h1><h2>In towns</h2><h3>At night</h3>{TEXT}<h2>Tags</h2><h2>More</h2></article>"
    assert lines(html) == ["Rivers", "In towns", "At night", *PROSE]


def test_a_long_paragraph_is_not_the_root():
    html = f"<body><div><p>{SENTENCE * 30}</p><p>{SENTENCE}</p><p>The end came late.</p></div>"
    assert len(lines(html)) == 3
