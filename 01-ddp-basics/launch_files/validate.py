"""Check launch files against the schemas of what reads them, without a cluster.

    make launch-files
    .venv-launch/bin/python 01-ddp-basics/launch_files/validate.py FILE.yaml [...]

A misspelled field is an error here. The API server of a cluster may only warn, and leave it out.
"""

import sys
from pathlib import Path

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

KUBERNETES = "1.37"


def check_kubernetes(document):
    """Raises: kubernetes_validate.ValidationError."""
    kubernetes_validate.validate(document, KUBERNETES, strict=True)
    return f"Kubernetes {KUBERNETES}"


def differences(given, read, path=""):
    """Yield where two nested values differ."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key in given | read:
            yield from differences(given.get(key), read.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, pair in enumerate(zip(given, read, strict=True)):
            yield from differences(*pair, f"{path}/{number}")
    elif given != read:
        yield f"{path}: {given!r} was read as {read!r}"


def check_trainer(document):
    """Read a document by Kubeflow's own classes. They drop what they do not know: compare."""
    kind = getattr(models, f"TrainerV1alpha1{document['kind']}")
    if odd := list(differences(document, kind.from_dict(document).to_dict())):
        raise ValueError("; ".join(odd))
    return "Kubeflow Trainer 2.3"


def check_skypilot(document):
    """Raises: ValueError. SkyPilot takes seconds to import, and keeps a database in HOME."""
    import sky

    sky.Task.from_yaml_config(document)
    return f"SkyPilot {sky.__version__}"


def check(document):
    """Return whose schema a document fits."""
    if "apiVersion" not in document:
        return check_skypilot(document)
    of_trainer = document["apiVersion"].startswith("trainer.kubeflow.org/")
    return (check_trainer if of_trainer else check_kubernetes)(document)


def main():
    failed = False
    for path in map(Path, sys.argv[1:]):
        for document in yaml.safe_load_all(path.read_text()):
            kind = document.get("kind", "task")
            name = document.get("metadata", document)["name"]
            try:
                says = f"fits {check(document)}"
            except Exception as error:
                failed = True
                where = "".join(f"/{key}" for key in getattr(error, "path", ()))
                says = f"FAULT: {where} {getattr(error, 'message', error)}"
            print(f"{path.name}: {kind} {name}: {' '.join(says.split())}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
