import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_series_doc.py"


def test_the_page_is_what_the_table_says():
    spec = importlib.util.spec_from_file_location("make_series_doc", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python scripts/make_series_doc.py"
