"""The LaTeX table, made into a page by pdfLaTeX."""

import shutil
import subprocess
from pathlib import Path

import pytest
from report_pages import PRIVATE, write_run

from fedstill.report.export import latex_text
from fedstill.report.record import read_run

pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
PAGE = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs, graphicx}
\begin{document}
%s
\end{document}
"""


def made(text: str, place: Path) -> str:
    """What pdfLaTeX says about a page with ``text``, which it has to finish without an error."""
    (place / "page.tex").write_text(PAGE % text)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0 and (place / "page.pdf").exists(), done.stdout[-2000:]
    return done.stdout


@pytest.mark.parametrize("data", ["digits", "a_b%c#d&e$f{g}h~i^j\\k<l>m|n±o–p", "été/größe µ×½ “x” …", "x\n\ny"])
def test_a_table_is_a_page_whatever_its_data_are_called(data: str, tmp_path: Path) -> None:
    records = [
        read_run(write_run(tmp_path / label, label=label, data=data, accuracy=0.5, **more))
        for label, more in (("fedavg", {}), ("a_b-c", {"guarantee": PRIVATE}), ("n" * 90, {}))
    ]
    said = made(latex_text(records), tmp_path)
    assert "Overfull" not in said and "undefined" not in said
