"""Write python.js: Python itself, the planner and the pipeline schedules.

Over file:// a page may load a script, but read no other file. So the script holds all
of them as text: Pyodide (CPython for WebAssembly, from npm) and the guide's own files.
"""

import base64
import gzip
import json
import re
from pathlib import Path

import tabulate

SITE_DIR = Path(__file__).resolve().parent
REPO = SITE_DIR.parent
PYODIDE = SITE_DIR / "node_modules" / "pyodide"
SCHEDULES = "05-advanced/pipeline_schedules.py"


def packed(content: bytes) -> str:
    """Return bytes as text, in less than half of their size."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def guide() -> dict[str, str]:
    """Return the planner's files, the schedules, what calls both, and tabulate."""
    planner = sorted(REPO.glob("planner/*.py")) + sorted(
        REPO.glob("planner/data/*.csv")
    )
    files = {str(file.relative_to(REPO)): file.read_text() for file in planner}
    # The lesson's functions are plain Python; its checks need PyTorch.
    lesson = re.sub(
        r"^from dist_common.*\n", "", (REPO / SCHEDULES).read_text(), flags=re.M
    )
    files["pipeline_schedules.py"] = lesson
    files["command.py"] = (SITE_DIR / "command.py").read_text()
    files["tabulate.py"] = Path(tabulate.__file__).read_text()
    return files


def write(folder: Path) -> None:
    """Write python.js into a folder: by name, gzip's bytes in base64."""
    scripts = [
        (PYODIDE / name).read_bytes() for name in ("pyodide.asm.js", "pyodide.js")
    ]
    versions = json.loads((PYODIDE / "pyodide-lock.json").read_text())["info"]
    files = {
        "pyodide.js": b"\n".join(scripts),
        "pyodide.asm.wasm": (PYODIDE / "pyodide.asm.wasm").read_bytes(),
        "python_stdlib.zip": (PYODIDE / "python_stdlib.zip").read_bytes(),
        "lock.json": json.dumps({"info": versions, "packages": {}}).encode(),
        "guide.json": json.dumps(guide()).encode(),
    }
    text = json.dumps(
        {name: packed(content) for name, content in files.items()}, indent=0
    )
    (folder / "python.js").write_text(f"const python_files = {text};\n")
