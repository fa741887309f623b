"""``replayssm-tune export``: a folder of the user's files -> one archive to contribute.

The archive holds registry files in their canonical form under ``replayssm_cute/tuned``: unpacked at the root
of the repository they are in place. The same folder gives the same bytes.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from replayssm_cute.errors import RegistryError
from replayssm_cute.registry import tuned
from replayssm_tune import rows

PLACE = "replayssm_cute/tuned"


def export(folder: Path, archive: Path, force: bool = False, op: str | None = None) -> list[str]:
    """Merge every file of the folder with the shipped rows of its name and pack the results.

    Args:
        force: take the folder's rows also where the shipped ones are better or of other versions.
        op: only the files of this operation; None takes all.

    Returns:
        a sentence for every file that is packed, and for every shipped row that stays.

    Raises:
        RegistryError: a file is malformed or predicted, there is none, or the shipped rows are of other versions.
    """
    files = sorted(folder.glob(f"op={op},*.json" if op else "*.json"))
    if not files:
        raise RegistryError(f"{folder}: no registry files there")
    said, packed = [], io.BytesIO()
    with tempfile.TemporaryDirectory() as merged, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as entries:
        for path in files:
            target = Path(merged, path.name)
            said += merge(path, target, force)
            entries.writestr(zipfile.ZipInfo(f"{PLACE}/{path.name}"), target.read_bytes())  # of a fixed date
            said.append(f"{path.name}: {len(tuned.load_file(target).rows)} rows")
    archive.write_bytes(packed.getvalue())
    return said


def merge(path: Path, target: Path, force: bool) -> list[str]:
    """Write the shipped rows with those of a file over them to ``target``; what stays, as ``rows.store`` says it.

    Shipped rows that are predicted give way as a whole.
    """
    if tuned.load_file(path).provenance.predicted:
        raise RegistryError(f"{path}: its rows are predicted; only measurements are shipped")
    shipped = tuned.SHIPPED_FOLDER / path.name
    if shipped.exists() and not tuned.load_file(shipped).provenance.predicted:
        shutil.copyfile(shipped, target)
    content = json.loads(path.read_text())
    return rows.store(target, content["provenance"], content["rows"], force)
