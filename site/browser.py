"""Find or unpack a headless Chromium, for drawing diagrams and for tests.

The environment variable CHROMIUM names one; else a Chromium or Chrome on the path, else
the one that npm installed (Linux only).
"""

import os
import shutil
import subprocess
from pathlib import Path

SITE_DIR = Path(__file__).resolve().parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
UNPACKED = SITE_DIR.parent / "runs" / "chromium"
UNPACK = (
    'import("@sparticuz/chromium")'
    ".then(c => c.default.executablePath()).then(console.log)"
)


def find_browser() -> str:
    """Return the path of a browser; npm's is unpacked into runs/chromium first."""
    installed = [shutil.which(name) for name in NAMES]
    for path in [os.environ.get("CHROMIUM"), *installed]:
        if path:
            return path
    UNPACKED.mkdir(parents=True, exist_ok=True)
    binaries = str(SITE_DIR.parent / ".venv-site" / "bin")  # with Node
    environment = os.environ | {
        "TMPDIR": str(UNPACKED),
        "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
    }
    return subprocess.check_output(
        ["node", "--input-type=module", "-e", UNPACK],
        cwd=SITE_DIR,
        text=True,
        timeout=120,
        env=environment,
    ).strip()
