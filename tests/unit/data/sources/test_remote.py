import pytest
from tests.expect import refused

from ingot.data.sources.remote import RefusedAddress, RemoteRules, is_public, resolve_url
from ingot.data.sources.web import WebFile, send_request

NAMES = {
    "public.example": ["93.184.215.14"],
    "both.example": ["2606:2800:21f:cb07:6820:80da:af6b:8b2c", "93.184.215.14"],
    "private.example": ["10.1.2.3"],
    "half.example": ["93.184.215.14", "127.0.0.1"],
    "zone.example": ["fe80::1%eth0"],
    "nowhere.example": [],
    "localhost": ["127.0.0.1"],
}
METADATA = "169.254.169.254"


def resolver(host, port):
    if host not in NAMES:
        raise OSError("unknown name")
    return NAMES[host]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://127.0.0.1:8080/x",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://017700000001/",
        "http://127.0.0.1./",
        "http://0/",
        "http://0.0.0.0/",
        "http://10.0.0.1/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        f"http://{METADATA}/latest/meta-data/",
        "http://2852039166/",
        "http://0xa9fea9fe/",
        "http://0251.0376.0251.0376/",
        "http://169.254.43518/",
        "http://224.0.0.1/",
        "http://255.255.255.255/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::127.0.0.1]/",
        f"http://[::ffff:{METADATA}]/",
        "http://[::ffff:a9fe:a9fe]/",
        "http://[0:0:0:0:0:ffff:7f00:1]/",
        "http://[fe80::1]/",
        "http://[fe80::1%25eth0]/",
        "http://[fd00:ec2::254]/",
        "http://[2002:a9fe:a9fe::1]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://[64:ff9b:1::a9fe:a9fe]/",
        "http://[2001:0:5ef5:79fd::1]/",
        "http://[ff02::1]/",
        "http://[2001:db8::1]/",
        "http://localhost/",
        "http://private.example/",
        "http://half.example/",
        "http://zone.example/",
        "http://public.example@127.0.0.1/",
        "http://user:word@public.example/",
        "http://public.example\\@127.0.0.1/",
        "http://public.example:0/",
        "http://public.example:99999/",
        "http://public .example/",
        "http://public.example/a b",
        "http://public.example/\r\nX: y",
        "http://públic.example/",
        "http:///path",
        "http://-bad.example/",
        "http://a..b/",
        "file:///etc/passwd",
        "ftp://public.example/",
        "gopher://public.example/",
        "//public.example/",
        "data:text/plain,x",
    ],
)
def test_refused(url):
    with pytest.raises(RefusedAddress) as caught:
        resolve_url(url, (), resolver)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("url", "address", "authority", "path"),
    [
        ("https://Public.Example/a?b=c#d", "93.184.215.14", "public.example", "/a?b=c"),
        ("http://public.example.:8080", "93.184.215.14", "public.example:8080", "/"),
        ("https://both.example:443/", NAMES["both.example"][0], "both.example", "/"),
        ("https://93.184.215.14/", "93.184.215.14", "93.184.215.14", "/"),
        ("https://[2606:4700::1111]/", "2606:4700::1111", "[2606:4700::1111]", "/"),
    ],
)
def test_public_ones_are_pinned(url, address, authority, path):
    found = resolve_url(url, (), resolver)
    assert (found.address, found.authority, found.path) == (address, authority, path)


def test_allowed_hosts_are_those_and_no_others():
    assert resolve_url("http://127.0.0.1:9/", ("127.0.0.1:9",), resolver).address == "127.0.0.1"
    assert resolve_url("http://private.example:9/", ("private.example",), resolver).address == "10.1.2.3"
    for url in ("http://127.0.0.1:10/", "http://2130706433:9/", "http://[::1]:9/"):
        with refused("E-URL-INVALID" if "2130706433" in url else "E-URL-PRIVATE"):
            resolve_url(url, ("127.0.0.1:9",), resolver)


def test_a_name_without_address_may_get_one_later():
    for name in ("nowhere.example", "unknown.example"):
        with pytest.raises(OSError):
            resolve_url(f"https://{name}/", (), resolver)


def test_is_public_knows_the_borders():
    inside = ("9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "100.63.255.255", "100.128.0.0", "223.0.0.1")
    assert all(map(is_public, inside)) and not is_public("nonsense") and not is_public("127.0.0.1%eth0")


REDIRECTS = [
    "http://127.0.0.1:1/",
    f"http://{METADATA}/",
    "http://2852039166/",
    "http://[::1]/",
    f"http://[::ffff:{METADATA}]/",
    f"//{METADATA}/x",
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
    "https://0x7f.1/",
    "http://localhost/",
    "http://[::1",
    "//[x]/y",
]


@pytest.mark.parametrize("location", REDIRECTS)
@pytest.mark.parametrize("hops", [1, 2])
def test_redirects_are_checked_like_the_first_url(site, location, hops):
    for hop in range(hops):
        site.faults[f"/{hop}"] = [(302, {"Location": location if hop == hops - 1 else f"/{hop + 1}"})]
    with pytest.raises(RefusedAddress):
        WebFile(f"{site.url}/0", site.rules).part(0, None)
    assert len(site.requests) == hops


def test_redirects_are_followed_twice(site):
    site.files["/end"] = b"here"
    site.faults["/0"] = [(301, {"Location": "/1"})]
    site.faults["/1"] = [(307, {"Location": f"{site.url}/end"})]
    assert b"".join(WebFile(f"{site.url}/0", site.rules).part(0, None).pieces) == b"here"
    for hop in range(4):
        site.faults[f"/{hop}"] = [(302, {"Location": f"/{hop + 1}"})]
    with refused("E-URL-REDIRECT"):
        WebFile(f"{site.url}/0", site.rules).part(0, None)


def test_the_name_is_resolved_once_per_request(site):
    """The connection goes to the checked address, because a second look-up could give another one."""
    site.files["/x"] = b"x"
    port, asked = int(site.host.partition(":")[2]), []

    def rebinding(host, port):
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.255.255.1"]

    allowed = (f"mirror.example:{port}",)
    url = f"http://mirror.example:{port}/x"
    with send_request(
        url, headers={}, timeout_seconds=2, redirects=0, allow_hosts=allowed, resolver=rebinding
    ) as response:
        assert b"".join(response.pieces()) == b"x"
    assert asked == ["mirror.example"]
    assert site.requests[0][2]["Host"] == f"mirror.example:{port}"


def test_no_way_from_https_to_http(monkeypatch):
    from ingot.data.sources import web

    class Moved:
        status, headers = 302, {"location": "http://public.example/"}

        def close(self):
            pass

    monkeypatch.setattr(web, "_send", lambda *arguments: Moved())
    with refused("E-URL-REDIRECT"):
        send_request("https://public.example/", headers={}, timeout_seconds=2, redirects=2, resolver=resolver)


def test_common_crawl_is_read_with_tls():
    assert not list(RemoteRules().problems())
    assert list(RemoteRules(common_crawl="http://data.commoncrawl.org").problems())
    assert list(RemoteRules(attempts=0).problems()) and list(RemoteRules(user_agent="a\r\nb").problems())
