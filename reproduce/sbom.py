"""Write ``reproduce/fedstill.cdx.json``: ``python reproduce/sbom.py``; the wheel carries it (PEP 770).

The bill of materials is CycloneDX 1.6. A wheel of fedstill has no code of others, so the components are what it asks
pip to install, with the ranges of ``pyproject.toml``; which versions pip took stands in an environment, not in a wheel.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def bill() -> dict[str, Any]:
    """The bill of materials of this version; equal files give equal bills."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "src/fedstill/__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    own = f"pkg:pypi/fedstill@{version}"
    components = []
    for line in project["dependencies"]:
        name, ranges = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", line).groups()  # type: ignore[union-attr]
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}"
        asked = [{"name": "fedstill:range", "value": ranges}]
        components.append({"type": "library", "bom-ref": purl, "name": name, "purl": purl, "properties": asked})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "fedstill",
                "version": version,
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in components]}],
    }


if __name__ == "__main__":
    (ROOT / "reproduce/fedstill.cdx.json").write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
