import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_configuration_doc.py"


def test_the_configuration_page_is_that_of_the_code():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), f"run `python {SCRIPT.relative_to(Path.cwd())}`"
