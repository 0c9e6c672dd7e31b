"""Two runs do not share a folder."""

from pathlib import Path

import pytest

from unmask.errors import UserError
from unmask.runs.lock import alone_in


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with alone_in(tmp_path / "run"):
        with pytest.raises(UserError, match="another process is training"), alone_in(tmp_path / "run"):
            pass
    with alone_in(tmp_path / "run"):
        pass
