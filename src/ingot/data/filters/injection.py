"""Score text that gives orders to language models: prompt injection, jailbreak templates, remains of chat formats.

Greshake et al. 2023 (arXiv:2302.12173) describe such text in pages that models read. Pages *about* such text contain
the same words. So each kind of phrase counts at most twice, a phrase in quotation marks or code counts little, and a
page about attacks, chat templates or research needs many hits for its length. Only English phrases are known; a long
page with a single order is kept, and so is a page that words its orders differently.
"""

import re
from collections.abc import Iterable

# Text addressed to models contains one of _NEEDLES and one of _ORDERS; the patterns search the bytes around needles.
_NEEDLES = (b"instructions", b"prompt", b"language model", b"chatgpt")
_ORDERS = (
    b"ignore ", b"disregard ", b"forget ", b"overrid", b"bypass", b"reveal", b"system prompt", b"you are now",
    b"from now on", b"you are a", b"attention", b"do anything now", b"developer mode", b"dear ",
)  # fmt: skip
_BEFORE, _AFTER = 300, 400  # bytes around a needle

_AI = (
    r"(?:an? )?(?:ai (?:assistant|agent|model|system|reviewer)s?|ai|llms?|(?:large )?language models?|chatgpt|"
    r"gpt(?:-?[345]\w*)?|claude|gemini|copilot|chatbots?)"
)
_FILLERS = r"(?: (?:all|any|every|each|the|your|my|of|these|those|everything|and))"
_EARLIER = r"(?:previous|prior|above|earlier|preceding|foregoing|existing|original|initial|system|safety)"
_RULES = r"(?:instructions?|prompts?|directions?|directives?|guidelines|rules|commands?|messages?|programming)"
# (points of the first hit, pattern) for each kind of phrase. A second hit gives half the points, further hits none.
_KINDS = [
    (points, re.compile(pattern))
    for points, pattern in (
        (
            2,
            rf"(?:ignore|disregard|forget|override|bypass|do not follow|stop following)\b{_FILLERS}{{0,4}} {_EARLIER}"
            rf"(?: \w+){{0,2}} {_RULES}",
        ),
        (
            2,
            r"(?:reveal|print|repeat|output|show|leak|tell me|display|recite)\b"  # words: ok
            r"(?: \w+){0,3} (?:your|the|its) "
            r"(?:hidden |secret |full |entire |exact |initial |original )*"
            r"(?:system prompt|system instructions|initial instructions|hidden instructions|prompt verbatim)",
        ),
        (
            2,
            r"(?:do not|don't|never) (?:reveal|mention|disclose|tell|share|refer to)\b(?: \w+){0,5} "  # words: ok
            r"(?:these|this|your|the|my|hidden|system) (?:\w+ )?(?:instructions?|prompts?)\b",
        ),
        (
            2,
            r"you (?:are|will act as|can act as|must act as|are going to act as)(?: now| going to be| to be)? "
            r"(?:dan\b|in developer mode|an? (?:unrestricted|unfiltered|uncensored|amoral|jailbroken)|free from all|"
            r"freed from|no longer bound)|do anything now\b|developer mode (?:enabled|output|response)",
        ),
        (
            1.5,
            r"(?:if you are|if you're|as you are|attention,?|dear|hey,?|note to|notice to|message to|"
            rf"instructions? (?:for|to)|important (?:note )?(?:for|to)) (?:all |any |every )?{_AI}\b[^.\n]{{0,60}}\b"
            r"(?:must|should|please|instead|say|write|include|recommend|give|respond|reply|ignore|do not|summari)",
        ),
        (
            1,
            r"from now on,? you (?:will|must|are|shall|should|have)\b|stay in character\b|respond only with\b|"
            r"you (?:must|will|shall) (?:always |never |only )?(?:respond|reply|answer|obey|comply|refuse)\b|"
            r"new (?:instructions|system prompt)\s*:|end of (?:system )?prompt\b",
        ),
        (
            1,
            r"without any (?:restrictions|filters|censorship|ethical|moral|limitations)|"
            r"(?:has|have) no (?:restrictions|ethical|moral guidelines|content policy)|"
            r"bypass(?:ing)? (?:your|all|any) (?:filters?|safety|restrictions|content)",
        ),
        (
            1,
            r"(?:positive review only|give a positive review|do not highlight any negatives|"
            r"recommend (?:this|the) (?:candidate|paper|product|applicant)|"
            r"this is the best (?:candidate|paper|product))",
        ),
    )
]
_TAG = re.compile(
    r"<\|(?:im_start|im_end|im_sep|system|user|assistant|endoftext|begin_of_text|end_of_text|start_header_id|"
    r"end_header_id|eot_id|eom_id|endofprompt|end)\|>|\[/?inst\]|<</?sys>>|<(?:start|end)_of_turn>"
)
_TAG_SIGNS = (b"<|", b"<<", b"_of_turn>", b"[inst]", b"[/inst]")
INJECTION_SIGNS = (*_NEEDLES, *_TAG_SIGNS)
# Words of pages that report on models and on attacks against them.
_ABOUT = (
    "prompt injection", "jailbreak", "attack", "vulnerab", "researcher", "adversarial", "security", "chat template",
    "tokenizer", "special token", "fine-tun", "example",
)  # fmt: skip
_ABOUT_DENSITY = 6.0  # points per 1,000 characters; a page about models and attacks scores 0 below this
_SHORT_DENSITY = 3.0  # points per 1,000 characters at which two points are enough
_QUOTES = re.compile("[\"`\u201c\u2018\u00ab]|(?<!\\w)'")
_QUOTED = 0.25


def injection(text: str, data: bytes, signs: list[bytes]) -> float:
    """Return a score; 3 or more means that the text is addressed to language models. data: `text` as lower-case UTF-8.
    signs: the members of INJECTION_SIGNS in `data`."""
    score = 0.0
    if any(sign in _NEEDLES for sign in signs) and any(order in data for order in _ORDERS):
        around = near(data, _NEEDLES, _BEFORE, _AFTER)
        for points, pattern in _KINDS:
            weights = sorted((_weight(around, match) for match in pattern.finditer(around)), reverse=True)
            score += points * sum(weights[:1]) + points / 2 * sum(weights[1:2])
    if any(sign in _TAG_SIGNS for sign in signs):
        tags = _TAG.findall(text.lower())
        often = len(tags) >= 4 and len(tags) * 500 >= len(text)
        score += min(len(set(tags)), 2) + (2 if often else 0)
    if score < 2:
        return score
    density = score * 1000 / len(text)
    lower = text.lower()
    if sum(word in lower for word in _ABOUT) >= 2 and density < _ABOUT_DENSITY:
        return 0.0
    return max(score, 3.0) if density >= _SHORT_DENSITY else score


def first_order(text: str) -> str:
    """Return the first phrase in `text` that gives orders to language models, in small letters; "" if there is none."""
    around = near(text.encode("utf-8", "surrogatepass").lower(), _NEEDLES, _BEFORE, _AFTER)
    return next((match[0] for _, pattern in _KINDS if (match := pattern.search(around))), "")


def _weight(text: str, match: re.Match) -> float:
    """Return the weight of `match`: lower if it is quoted, with a quotation mark in the 40 characters before it in its
    line."""
    before = text[max(match.start() - 40, 0) : match.start()].rpartition("\n")[2]
    return _QUOTED if _QUOTES.search(before) else 1.0


def near(data: bytes, needles: Iterable[bytes], before: int, after: int, most: int = 200) -> str:
    """Return the bytes around the first `most` occurrences of the needles, without overlap, as lines of text.

    before, after: bytes before and after the start of a needle. Patterns then search these lines, not the whole text.
    """
    places = []
    for needle in needles:
        place = data.find(needle)
        while place >= 0 and len(places) < most:
            places.append(place)
            place = data.find(needle, place + after)
    stretches, done = [], 0
    for place in sorted(places):
        start = max(place - before, done)
        done = max(place + after, done)
        stretches.append(data[start:done])
    return b"\n".join(stretches).decode("utf-8", "ignore")
