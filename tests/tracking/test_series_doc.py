from tests.scripts import script


def test_the_page_is_what_the_table_says():
    module = script("make_series_doc.py")
    assert module.PAGE.read_text() == module.page(), "run python scripts/make_series_doc.py"
