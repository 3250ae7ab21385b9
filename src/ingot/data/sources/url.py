"""Canonical URLs (one spelling per page), and the detection of repeated URLs.

The rules remove only differences that provably, or by wide convention, do not change the page. Not merged are http and
https, "www." and the bare host, index.html and its folder; near-duplicate detection finds these if the text is similar.
"""

import re
from urllib.parse import quote, urlsplit

import xxhash

_DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21}
# Parameters that identify the visitor or the referrer, not the content: campaign tags, click ids, session ids.
_TRACKING_PREFIXES = ("utm_", "mtm_", "pk_", "hsa_", "__hs")
_TRACKING_NAMES = """
    gclid gclsrc dclid gbraid wbraid fbclid msclkid yclid ysclid twclid ttclid igshid igsh li_fat_id mc_cid mc_eid
    mkt_tok _ga _gl _hsenc _hsmi vero_id vero_conv oly_anon_id oly_enc_id wickedid rb_clickid s_cid ncid cmpid
    srsltid gad_source gad_campaignid wt_mc mibextid epik rdt_cid sscid irclickid _openstat ref_src
    phpsessid jsessionid aspsessionid oscsid zenid cfid cftoken
"""
_TRACKING = frozenset(_TRACKING_NAMES.split())
_SESSION_IN_PATH = re.compile(r";jsessionid=[^/?;]*", re.IGNORECASE)
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = re.compile(r"(https?)://([a-z0-9.-]*[a-z0-9])((?:/[A-Za-z0-9_~-]+(?:\.[A-Za-z0-9_~-]+)*)*)", re.ASCII)


def canonical_url(url: str) -> str:
    """Return the canonical spelling of `url`. Never raises: a URL that cannot be parsed is only stripped of space.

    By RFC 3986, section 6: scheme and host in lower case, IDN hosts as punycode, no dot at the host's end, no default
    port, dot segments resolved, %7E written as ~, other escapes in upper case, non-ASCII escaped as UTF-8.
    By convention: no user name, no fragment (but "#!" names a page), no campaign, click or session parameters,
    remaining parameters sorted by name (repeated names keep their order), no empty query, no slash at a path's end.
    """
    url = url.strip()
    if _PLAIN.fullmatch(url):
        return url if url.count("/") > 2 else url + "/"  # the common case: already canonical
    try:
        parts = urlsplit(re.sub(r"[\t\r\n]", "", url))
        port = parts.port
        host = _host(parts.hostname or "")
    except ValueError:  # a port that is not a number, an invalid IPv6 address
        return url
    scheme = parts.scheme.lower()
    if not scheme or not host:
        return url
    if port is not None and port != _DEFAULT_PORTS.get(scheme):
        host = f"{host}:{port}"
    path = _path(parts.path)
    query = _query(parts.query)
    fragment = f"#{parts.fragment}" if parts.fragment.startswith("!") else ""
    return f"{scheme}://{host}{path}{'?' + query if query else ''}{fragment}"


def _host(host: str) -> str:
    host = host.lower().rstrip(".")
    if ":" in host:
        return f"[{host}]"
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return host  # not a valid name, but a unique spelling


def _escaped(text: str) -> str:
    def unescape(match: re.Match) -> str:
        char = chr(int(match[1], 16))
        return char if char in _UNRESERVED else match[0].upper()

    return quote(_ESCAPE.sub(unescape, text), safe="%/:?#[]@!$&'()*+,;=-._~", errors="surrogatepass")


def _path(path: str) -> str:
    if ";" in path:
        path = _SESSION_IN_PATH.sub("", path)
    path = _escaped(path)
    kept: list[str] = []
    for segment in path.split("/")[1:]:
        if segment == "..":
            kept[-1:] = []
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept).rstrip("/")


def _query(query: str) -> str:
    pieces = []
    for piece in query.split("&"):
        name = piece.partition("=")[0].lower()
        if piece and name not in _TRACKING and not name.startswith(_TRACKING_PREFIXES):
            pieces.append(_escaped(piece))
    return "&".join(sorted(pieces, key=lambda piece: piece.partition("=")[0]))


class UrlDuplicates:
    """A set of canonical URLs, used to keep only the first page with each URL.

    The set stores a 64-bit hash per URL (about 80 bytes in a Python set, measured). The expected number of false
    duplicates among n URLs is n^2 / 2^65: it reaches 1 at about 6 billion URLs.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def seen(self, canonical: str) -> bool:
        """Return True if `canonical` was seen before. Add it to the set."""
        before = len(self._hashes)
        self._hashes.add(xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass")))
        return len(self._hashes) == before
