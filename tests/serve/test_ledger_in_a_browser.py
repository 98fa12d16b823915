"""The page of a ledger's service in headless Chromium: from a phone's width to a desk's, and without a mouse."""

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tacit.privacy import Budget, Ledger, events
from tacit.serve import Role
from tests.serve.conftest import Service
from tools.check_page import CHROMIUM, FLAGS, SCHEMES, WIDTHS, complaints, look

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.fixture
def page(service: Service, clinic: Ledger, tmp_path: Path) -> Path:
    """What the service answers a reader, after charges to two subjects."""
    long = "a subject with a name that is rather long for a phone"
    clinic.subject(long, Budget(1.0, 1e-6), neighbours="replace-one")
    for number in range(4):
        clinic.charge("clinic", events.gaussian(9.0 + number), stage="finetune", note="a run")
        clinic.charge(long, events.gaussian(20.0), stage="calibrate", note="x" * 60)
    answer = httpx.get(service.url, auth=("reader", service.token(Role.READ)), timeout=300.0)
    assert answer.status_code == 200
    file = tmp_path / "page.html"
    file.write_text(answer.text, "utf-8")
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_and_no_curve_is_cut(page: Path, width: int) -> None:
    for scheme in SCHEMES:
        found = look(page, width, scheme)
        assert complaints(found, width) == []
        assert found["figures"] == 2, "a curve for each subject"


def test_it_is_read_without_a_mouse_and_without_scripts(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert re.search(r"<html[^>]* lang=", text)
    assert 'name="viewport"' in text
    for opening in re.findall(r'<\w+[^>]*class="scroll"[^>]*>', text):
        assert 'tabindex="0"' in opening, "what scrolls sideways is reached by the keyboard"


def test_a_browser_shows_it_for_a_token_as_password(service: Service, clinic: Ledger, tmp_path: Path) -> None:
    clinic.charge("clinic", events.gaussian(9.0), stage="finetune")

    def shown(token: str) -> str:
        url = service.url.replace("http://", f"http://reader:{token}@")
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

    assert "Privacy ledger" in (said := shown(service.token(Role.READ)))
    assert "clinic" in said
    assert "clinic" not in shown("not-a-token")
