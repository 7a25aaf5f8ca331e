"""A Sphinx extension: links to files outside of ``docs`` become plain text, and headings have a level."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform


class Outside(SphinxPostTransform):
    """Replaces such links by their text; all others are left to Sphinx, which warns if they lead nowhere."""

    default_priority = 1  # before MyST looks for their targets

    def run(self, **kwargs: Any) -> None:
        """Replace the links of one page."""
        root = Path(self.app.srcdir).resolve()
        folder = Path(self.env.doc2path(self.env.docname)).resolve().parent
        for link in list(self.document.findall(pending_xref)):
            path = (folder / str(link.get("reftarget", "")).partition("#")[0]).resolve()
            exists = path.exists() or path.with_name(f"{path.name}.md").exists()  # MyST leaves the suffix of pages out
            if exists and not path.is_relative_to(root):
                link.replace_self(nodes.inline("", "", *link.children))


def level_of_captions(app: Sphinx, page: str, template: str, context: dict[str, Any], _: nodes.document | None) -> None:
    """Give the captions of lists of pages, which Sphinx calls headings, the level that a heading needs."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = context[part].replace(' role="heading"', ' role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_post_transform(Outside)
    app.connect("html-page-context", level_of_captions, priority=900)  # once the theme has made its lists
    return {"parallel_read_safe": True, "parallel_write_safe": True}
