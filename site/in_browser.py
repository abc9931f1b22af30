"""Write python.js: Python itself and the planner, which plan_in_browser.md runs.

Over file:// a page may load a script, but read no other file. So the script has all of them as
text: Pyodide (CPython for WebAssembly, from site/node_modules), and the guide's own files.
"""

import base64
import gzip
import json
from pathlib import Path

import tabulate

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PYODIDE = HERE / "node_modules" / "pyodide"
TOOL = ("planner/plan.py", "planner/*.py")


def packed(content: bytes) -> str:
    """Return bytes as text, in less than half of their size."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def guide() -> dict[str, str]:
    """Return the planner's files, what runs a command, and tabulate."""
    found = sorted(file for pattern in TOOL for file in REPOSITORY.glob(pattern))
    files = {str(file.relative_to(REPOSITORY)): file for file in found}
    files |= {"command.py": HERE / "command.py", "tabulate.py": Path(tabulate.__file__)}
    return {name: file.read_text() for name, file in files.items()}


def write(folder: Path) -> None:
    """Write python.js into a folder: by name, gzip's bytes in base64."""
    scripts = [(PYODIDE / name).read_bytes() for name in ("pyodide.asm.js", "pyodide.js")]
    versions = json.loads((PYODIDE / "pyodide-lock.json").read_text())["info"]
    files = {
        "pyodide.js": b"\n".join(scripts),
        "pyodide.asm.wasm": (PYODIDE / "pyodide.asm.wasm").read_bytes(),
        "python_stdlib.zip": (PYODIDE / "python_stdlib.zip").read_bytes(),
        "lock.json": json.dumps({"info": versions, "packages": {}}).encode(),
        "guide.json": json.dumps(guide()).encode(),
    }
    text = json.dumps({name: packed(content) for name, content in files.items()}, indent=0)
    said = "// Written by site/in_browser.py."
    (folder / "python.js").write_text(f"{said}\nconst python_files = {text};\n")
