from pathlib import Path

import pytest

from tests.pipeline.made_up_images import MODEL, make_images


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with 40 images of 20 patients, their table, and a model in tiny_model.py."""
    (tmp_path / "tiny_model.py").write_text(MODEL)
    make_images(tmp_path)
    return tmp_path
