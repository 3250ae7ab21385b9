"""Words in class, id, role and schema.org attributes that show the role of an element, and the automaton to find them.

A pattern is matched as whole words: "post*body" finds "post-body", "postBody", "post__body" and "postbody". A `+` at
its start or end leaves that side open: "newsletter+" also finds "newsletters". "role=main" matches a value of the
attribute role that begins with the word "main"; "style=+display*none" matches anywhere in the value. The words are
common to many sites and content systems, in English, German, French, Spanish, Italian, Portuguese, Dutch and Polish;
none is specific to one site.
"""

from collections import deque
from enum import IntFlag
from functools import cache

import numpy as np

from ingot.data.extract.tags import ID

STRIDE, WORD_STRIDE = 64, 32  # row lengths of the two tables, as in page.c
HYPHEN, EQUALS, DIGITS = 27, 28, 29  # symbols after the letters 1..26
# Kinds of attributes. PLAIN: the value is matched. NAMED: name and value are matched. TARGET: presence marks a link.
PLAIN, NAMED, TARGET = 1, 2, 3
ATTRIBUTES = {"class": PLAIN, "id": PLAIN, "href": TARGET} | dict.fromkeys(
    ("role", "itemprop", "itemtype", "style", "hidden", "aria-hidden", "aria-label", "rel", "type", "property"), NAMED
)


class ElementMark(IntFlag):
    """The roles of an element that its attributes show."""

    BODY = 1 << 0  # the text of an article
    ARTICLE = 1 << 1  # an article with its title, byline and so on
    NAVIGATION = 1 << 2
    FOOTER = 1 << 3
    SIDE = 1 << 4
    SHARE = 1 << 5
    RELATED = 1 << 6
    COMMENT = 1 << 7
    AD = 1 << 8
    META = 1 << 9  # author, date, tags
    CAPTION = 1 << 10
    REQUEST = 1 << 11  # cookies, newsletter, log in
    HIDDEN = 1 << 12
    DATA = 1 << 13  # a script of JSON-LD
    LINK = 1 << 63  # the element has href (on text rows: white space precedes the text)


_PATTERNS = {
    ElementMark.BODY: """
        itemprop=article*body itemprop=review*body itemprop=text property=+article*body
        article*body article*content article*text article*copy article*main article*inner article*paragraphs
        articlebody+ post*body post*content post*text post*entry post*copy post*message
        entry*content entry*body entry*text entry*inner story*body story*content story*text
        news*body news*content news*text news*detail body*text body*copy text*body main*text content*text
        content*body blog*content blog*post*content single*content single*post*content single*body
        field*name*body field*body node*body node*content wysiwyg rich*text text*formatted e*content td*post*content
        artikel*text artikel*inhalt artikel*body beitrag*text beitragstext artikeltext fliesstext meldung*text
        texte*article corps*article contenu*article article*corps cuerpo*noticia texto*noticia cuerpo*articulo
        nota*cuerpo texto*nota cuerpo*nota testo*articolo corpo*articolo corpo*materia conteudo*materia
        texto*materia conteudo*texto tresc*artykulu artykul*tresc artikel*tekst full*text fulltext
        document*content review*body recipe*body section*content press*release*body
    """,
    ElementMark.ARTICLE: """
        role=article itemtype=+schema*org*article itemtype=+schema*org*news*article itemtype=+schema*org*blog*posting
        itemtype=+schema*org*report+
    """,
    ElementMark.NAVIGATION: """
        nav navi +navbar+ navbox +navigation+ menu menus submenu topnav subnav mainnav +breadcrumb+ bread*crumb+ krumel+
        crumbs +pagination+ pager pagenav paging page*nav page*numbers role=navigation role=menu role=menubar
        role=search role=tablist skip*link+ skip*to+ toc table*of*contents sitemap post*nav+ nav*links nav*next
        nav*previous next*prev prev*next next*post previous*post menu*item dropdown brotkrumen ariane
        fil*d*ariane migas inhaltsverzeichnis seitennavigation topbar aria*label=breadcrumb+ letter*nav
    """,
    ElementMark.FOOTER: """
        footer foot colophon role=contentinfo imprint impressum copyright legal disclaimer bottom*bar
        site*info footnav pie page*foot site*footer article*footer entry*footer post*footer
    """,
    ElementMark.SIDE: """
        +sidebar+ side*bar aside role=complementary right*col right*column rightcol rightcolumn rail
        right*rail left*rail left*col leftcol sidecol side*column secondary widget widgets widget*area marginal+
        randspalte seitenleiste seitenspalte barre*laterale infobox info*box factbox fact*box
    """,
    ElementMark.SHARE: """
        share shares sharing share*bar sharebar sharedaddy share*buttons share*tools sharetools social+
        sociable addthis+ addtoany+ shariff follow follow*us followus teilen partager partage
        compartir condividi compartilhar udostepnij twitter facebook whatsapp pinterest bookmark bookmarks
        tweet like*button article*tools post*tools article*actions share*links
    """,
    ElementMark.RELATED: """
        +related+ +recommend+ read*more readmore read*next more*stories more*articles more*news more*from
        more*on more*posts more*info most*read mostread most*popular most*viewed popular popular*posts trending similar+
        also*like also*read see*also you*may you*might teaser teasers latest*news latest*posts latest*stories
        recent*posts recent*articles recirc+ outbrain taboola up*next upnext suggest+ suggestions ob*widget
        verwandt+ aehnlich+ mehr*zum*thema weiterlesen weitere*artikel weitere*meldungen empfehlung+ lesen*sie
        relacionad+ lea*tambien correlat+ leggi*anche voir*aussi lire*aussi zum*thema
        polecane powiazane gerelateerd leia*mais leia*tambem crosslink+ cross*link+ promo promos promobox
        yarpp+ zergnet revcontent more*link story*list news*list article*list post*list linkbox link*list
        linklist carousel slider slideshow gallery ticker
    """
    "articles*lies",  # French for related articles. words: ok
    ElementMark.COMMENT: """
        comment +comments+ +commentlist+ comment*list comment*form comment*section comments*area comments*section
        disqus+ dsq+ respond commentform +kommentar+ commentaire+ comentario+ commento commenti
        comentarios komentarz+ reacties livefyre+ fb*comments talkback reply replies role=comment
        itemprop=comment comol spot*im discussion guestbook
    """,
    ElementMark.AD: """
        ad ads adv +advert+ adsense adslot ad*slot ad*unit ad*container adbox adsbygoogle ad*wrapper banner banners
        +sponsor+ werbung anzeige anzeigen publicidad pubblicita publicidade reklama dfp google*ad+ gpt*ad+
        ad*label ad*placeholder promotion paid*content advertorial*teaser
    """,
    ElementMark.META: """
        byline bylines author authors author*box author*info author*bio authorbox about*author autor autoren auteur
        autore meta metadata metas date datetime dateline timestamp time*stamp pubdate publish*date published
        posted*on posted*by post*date entry*date entry*meta post*meta post*info article*meta article*info
        article*infos article*date tags tag*list taglist tag*links tags*links tagcloud cat*links categories
        category*list post*categories post*tags keywords schlagworte schlagwort+ mots*cles etiquetas
        reading*time read*time itemprop=author itemprop=date+ itemprop=keywords itemprop=publisher
        itemprop=aggregate*rating rel=author rel=tag views view*count rating ratings votes vote star*rating datum
        post*author article*author user*info user*profile bio profile print printfriendly edit*link editsection
        mw*editsection icon vcard toolbar tools actions action buttons button btn controls options info*bar
        filed*under posted*in last*updated location
    """,
    ElementMark.CAPTION: """
        caption captions figcaption wp*caption+ image*caption img*caption photo*caption credit credits
        image*credit photo*credit bildunterschrift bildunterzeile bildtext bildnachweis legende legenda
        pie*de*foto didascalia copyright*info attachment thumb*caption media*caption image*source image*copyright
        legend unterschrift attribution img*credit bild*info slide*caption
    """,
    ElementMark.REQUEST: """
        cookie+ consent gdpr modal popup pop*up overlay +newsletter+ subscribe+ subscription sign*up signup
        login log*in signin sign*in register registration mailing*list captcha notification notifications noprint
        no*print hide*print print*hide donate donation optin opt*in lightbox toast paywall*prompt abo*box
        push*notification permission mc*embed+ app*download onetrust+ paidbox paid*box
        search search*form searchform searchbox cta call*to*action feedback survey poll quiz
    """,
    ElementMark.HIDDEN: """
        hidden= aria*hidden=true style=+display*none style=+visibility*hidden display*none visually*hidden
        visuallyhidden sr*only screen*reader+ offscreen u*hidden is*hidden nodisplay
    """,
    ElementMark.DATA: "type=application*ld*json",
}


def _spellings(pattern: str) -> list[str]:
    """Return the strings of a-z, '-' and '=' that the automaton searches for to match `pattern`."""
    name, named, value = pattern.rpartition("=")
    joint = "=" if named else "-"
    stems = [value.strip("+").replace("*", between) for between in ((joint, "") if "*" in value else ("",))]
    closed = "" if value.endswith("+") or not value else joint
    if named:  # a value with a "+" in front is found anywhere in the values of all named attributes
        opened = joint if value.startswith("+") else f"-{name.replace('*', joint)}="
    else:
        opened = "" if value.startswith("+") else "-"
    return [opened + stem + closed for stem in stems]


def symbol(character: str) -> int:
    """Return the symbol of a lower-case letter, digit, '-' or '='."""
    if character in "-=":
        return HYPHEN if character == "-" else EQUALS
    return DIGITS + int(character) if character.isdigit() else ord(character) - ord("a") + 1


@cache
def name_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return the trie of tag names and of '=' + attribute names: (uint16 [states, STRIDE], uint8 [states]).

    The first array has the next state for each symbol, the second the tag id or attribute kind whose name ends in a
    state, or 0. State 0 is the root, state 1 the state of unknown names.
    """
    rows, ids = [np.ones(STRIDE, np.uint16), np.ones(STRIDE, np.uint16)], [0, 0]
    for name, number in [*ID.items(), *((f"={name}", kind) for name, kind in ATTRIBUTES.items())]:
        state = 0
        for character in name:
            following = int(rows[state][symbol(character)])
            if following == 1:
                following = len(rows)
                rows[state][symbol(character)] = following
                rows.append(np.ones(STRIDE, np.uint16))
                ids.append(0)
            state = following
        ids[state] = number
    return np.stack(rows), np.array(ids, np.uint8)


@cache
def word_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return the Aho-Corasick automaton (1975) of all patterns: (uint16 [states, WORD_STRIDE], uint64 [states]).

    The first array has the next state for each symbol, the second the marks of all patterns that end in a state.
    """
    children: list[dict[int, int]] = [{}]
    marks = [0]
    for mark, patterns in _PATTERNS.items():
        for pattern in patterns.split():
            for spelling in _spellings(pattern):
                state = 0
                for number in map(symbol, spelling):
                    if number not in children[state]:
                        children[state][number] = len(children)
                        children.append({})
                        marks.append(0)
                    state = children[state][number]
                marks[state] |= int(mark)
    table = np.zeros((len(children), WORD_STRIDE), np.uint16)
    queue = deque([(0, 0)])  # (state, the state of its longest proper suffix)
    while queue:
        state, suffix = queue.popleft()
        marks[state] |= marks[suffix]
        if state:
            table[state] = table[suffix]
        for number, child in children[state].items():
            queue.append((child, int(table[suffix][number]) if state else 0))
            table[state][number] = child
    return table, np.array(marks, np.uint64)
