"""HTML to text: the main content of a page, by resiliparse (Bevendorff et al. 2018), on the lexbor parser."""

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree, traverse_dom

from ingot.data.extract.refused import Refused

_USUAL_DEPTH = 64


def main_text(html: str, max_depth: int, max_work: int) -> str:
    """The main content. Raises Refused for hostile nesting, and whatever the parser raises.

    max_depth: levels of elements. max_work: sum of the depths of all elements, which the search for main content takes
    time in proportion to (measured: 0.2 µs each).
    """
    tree = HTMLTree.parse(html)
    check_depth(html, tree, max_depth, max_work)
    return tree_text(tree)


def tree_text(tree: HTMLTree) -> str:
    return extract_plain_text(
        tree,
        preserve_formatting=True,
        main_content=True,
        list_bullets=False,
        alt_texts=False,
        links=False,
        form_fields=False,
        noscript=False,
        comments=False,
    )


def check_depth(html: str, tree: HTMLTree, max_depth: int, max_work: int) -> None:
    """Raises Refused. The walk over the tree is slow (4 µs per element), so it is done where a bound is broken.

    Before that come selectors, the shortest first: few pages are deeper than usual.
    """
    elements = html.count("<")  # at least
    root = tree.document.document_element if tree.document else None
    if root is None or elements <= min(max_depth, max_work**0.5):
        return
    harmless_depth = max(max_work // elements, 32)
    if not _is_deeper(root, min(_USUAL_DEPTH, max_depth, harmless_depth)):
        return
    if _is_deeper(root, max_depth):
        raise Refused("extract.too_deep", f"over {max_depth} levels")
    if harmless_depth < max_depth and _is_deeper(root, harmless_depth):
        depths: list[int] = []
        traverse_dom(root, lambda context: depths.append(context.depth), elements_only=True)
        if sum(depths) > max_work:
            raise Refused("extract.too_deep", f"{len(depths)} elements at mean depth {sum(depths) / len(depths):.0f}")


def _is_deeper(root, depth: int) -> bool:
    """Whether an element has at least `depth` ancestors; matched at native speed."""
    return root.query_selector(">".join(["*"] * (depth + 1))) is not None
